"""Draw tokens: one uniform number a token, from the request's own generator."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

BLOCK = 16  # uniform numbers fetched from a generator at a time


def draw(
    logits: Float[Tensor, "B V"],
    uniform: Float[Tensor, "B"],
    temperature: Float[Tensor, "B"],
    greedy: Bool[Tensor, "B"],
) -> tuple[Int[Tensor, "B"], Float[Tensor, "B"]]:
    """A token for each row, by inverting its cumulative distribution, and the token's log-probability.

    Args:
        logits: logits of the model, of any floating type.
        uniform: float64 number in [0, 1) of each row.
        temperature: divides the logits; positive.
        greedy: rows that take the most likely token instead.

    Returns:
        Tokens, and their log-probabilities under ``softmax(logits / temperature)`` in float32, nats.
    """
    logprobs = torch.log_softmax(logits.float() / temperature[:, None], dim=-1)
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    # Scaled by the true total, which rounding keeps from being 1; right=True never lands on a token of probability 0.
    target = (uniform * cumulative[:, -1])[:, None]
    tokens = torch.searchsorted(cumulative, target, right=True).clamp_(max=logits.shape[-1] - 1)
    tokens = torch.where(greedy[:, None], logprobs.argmax(-1, keepdim=True), tokens)
    return tokens.squeeze(1), logprobs.gather(-1, tokens).squeeze(1)


def uniforms(seed: int) -> Iterator[float]:
    """Uniform numbers in [0, 1) of a generator of their own, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.rand(BLOCK, generator=generator, dtype=torch.float64).tolist()
