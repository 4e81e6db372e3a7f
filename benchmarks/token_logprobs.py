"""Time and memory of ``token_logprobs`` beside log_softmax + gather, forward and backward.

Run as ``python benchmarks/token_logprobs.py --output token_logprobs.json``.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from head_to_head import HeadToHead, Version
from torch import Tensor

from sorl_lightning.functional.logprobs import token_logprobs


def plain(hidden: Tensor, head_weight: Tensor, targets: Tensor) -> Tensor:
    """Sum of the targets' log-probabilities, by way of all logits."""
    return (hidden @ head_weight.T).log_softmax(-1).gather(1, targets[:, None]).sum()


def plain_entropy(hidden: Tensor, head_weight: Tensor, targets: Tensor) -> Tensor:
    """The same plus the sum of the entropies."""
    logprobs = (hidden @ head_weight.T).log_softmax(-1)
    return logprobs.gather(1, targets[:, None]).sum() - (logprobs.exp() * logprobs).sum()


def chunked(hidden: Tensor, head_weight: Tensor, targets: Tensor, chunk_size: int) -> Tensor:
    """Sum of the targets' log-probabilities, chunk by chunk."""
    return token_logprobs(hidden, head_weight, targets, chunk_size=chunk_size)[0].sum()


def chunked_entropy(hidden: Tensor, head_weight: Tensor, targets: Tensor, chunk_size: int) -> Tensor:
    """The same plus the sum of the entropies."""
    logprobs, entropy = token_logprobs(hidden, head_weight, targets, chunk_size=chunk_size)
    return logprobs.sum() + entropy.sum()


def versions(chunk_size: int) -> dict[str, Version]:
    """What is compared, by name."""
    return {
        "plain": plain,
        "plain with entropy": plain_entropy,
        "chunked": partial(chunked, chunk_size=chunk_size),
        "chunked with entropy": partial(chunked_entropy, chunk_size=chunk_size),
    }


def make_inputs(arguments: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """Random hidden states, head and targets, allocated and touched."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(arguments.tokens, arguments.width, generator=generator).requires_grad_()
    head_weight = torch.randn(arguments.vocabulary, arguments.width, generator=generator).mul_(0.05).requires_grad_()
    return hidden, head_weight, torch.randint(arguments.vocabulary, (arguments.tokens,), generator=generator)


if __name__ == "__main__":
    HeadToHead(
        script=__file__,
        versions=versions,
        make_inputs=make_inputs,
        sizes={"tokens": 4096, "vocabulary": 32000, "width": 256, "chunk_size": 256, "repeats": 5, "threads": 1},
        baseline="plain",
    ).main(__doc__)
