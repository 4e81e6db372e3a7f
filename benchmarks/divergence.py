"""Time and memory of ``chunked_divergence`` beside F.kl_div on full log-softmaxes, forward and backward.

Run as ``python benchmarks/divergence.py --output divergence.json``.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from head_to_head import HeadToHead, Version
from torch import Tensor
from torch.nn.functional import kl_div

from sorl_lightning.functional.chunked_divergence import chunked_divergence


def plain(hidden: Tensor, head: Tensor, teacher_hidden: Tensor, teacher_head: Tensor) -> Tensor:
    """Sum of the reverse KLs, by way of both models' logits."""
    student = (hidden @ head.T).log_softmax(-1)
    with torch.no_grad():
        teacher = (teacher_hidden @ teacher_head.T).log_softmax(-1)
    return kl_div(teacher, student, log_target=True, reduction="none").sum(-1).sum()


def plain_forward(hidden: Tensor, head: Tensor, teacher_hidden: Tensor, teacher_head: Tensor) -> Tensor:
    """Sum of the forward KLs, likewise."""
    student = (hidden @ head.T).log_softmax(-1)
    with torch.no_grad():
        teacher = (teacher_hidden @ teacher_head.T).log_softmax(-1)
    return kl_div(student, teacher, log_target=True, reduction="none").sum(-1).sum()


def chunked(*inputs: Tensor, kind: str, chunk_size: int) -> Tensor:
    """The same, chunk by chunk."""
    return chunked_divergence(*inputs, kind=kind, chunk_size=chunk_size).sum()  # type: ignore[arg-type]


def versions(chunk_size: int) -> dict[str, Version]:
    """What is compared, by name."""
    return {
        "plain reverse": plain,
        "plain forward": plain_forward,
        "chunked reverse": partial(chunked, kind="reverse_kl", chunk_size=chunk_size),
        "chunked forward": partial(chunked, kind="forward_kl", chunk_size=chunk_size),
    }


def make_inputs(arguments: argparse.Namespace) -> tuple[Tensor, ...]:
    """Random hidden states and heads of student and teacher, allocated and touched."""
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for trains in (True, False):
        hidden = torch.randn(arguments.tokens, arguments.width, generator=generator)
        head = torch.randn(arguments.vocabulary, arguments.width, generator=generator).mul_(0.05)
        inputs += [hidden.requires_grad_(trains), head.requires_grad_(trains)]
    return tuple(inputs)


if __name__ == "__main__":
    HeadToHead(
        script=__file__,
        versions=versions,
        make_inputs=make_inputs,
        sizes={"tokens": 2048, "vocabulary": 151936, "width": 256, "chunk_size": 128, "repeats": 3, "threads": 1},
    ).main(__doc__)
