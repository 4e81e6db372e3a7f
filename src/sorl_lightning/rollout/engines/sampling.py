"""Draw tokens: one uniform number a token, from the request's own generator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sorl_lightning.rollout.engine import GenerationRequest

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


class Sampler:
    """Draws the tokens of one turn of several requests, each from its own seed.

    At temperature 0 a row takes its most likely token, and reports its log-probability at temperature 1.

    Args:
        requests: what is generated, in the order of the batch.
        device: where the logits are.
    """

    def __init__(self, requests: Sequence[GenerationRequest], device: torch.device) -> None:
        self.device = device
        self.generators = [torch.Generator().manual_seed(request.seed) for request in requests]
        temperature = torch.tensor([request.temperature for request in requests], device=device)
        self.greedy = temperature == 0
        self.temperature = temperature.masked_fill(self.greedy, 1.0)
        self.uniforms = torch.empty(len(requests), 0, dtype=torch.float64)
        self.used = 0

    def draw(self, logits: Float[Tensor, "B V"]) -> tuple[list[int], list[float]]:
        """Next token of each row, and its log-probability in nats; NaN where the logits held one."""
        if self.used == self.uniforms.shape[1]:
            fresh = [torch.rand(BLOCK, generator=generator, dtype=torch.float64) for generator in self.generators]
            self.uniforms, self.used = torch.stack(fresh).to(self.device), 0
        uniform = self.uniforms[:, self.used]
        self.used += 1
        tokens, logprobs = draw(logits, uniform, self.temperature, self.greedy)
        return tokens.tolist(), logprobs.tolist()

    def keep(self, order: Sequence[int]) -> None:
        """Go on with the rows ``order`` only, in that order."""
        self.generators = [self.generators[row] for row in order]
        index = torch.tensor(order, device=self.device)
        self.uniforms, self.temperature, self.greedy = self.uniforms[index], self.temperature[index], self.greedy[index]
