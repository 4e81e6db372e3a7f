"""An engine whose probabilities are not the trainer's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.functional.divergences import sampled_divergence
from sorl_lightning.functional.ratios import Correction, mismatch_correction
from sorl_lightning.types import RolloutBatch


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """How the loss makes up for an engine whose probabilities differ from the trainer's.

    Args:
        correction: "truncate" holds the ratio of the two at ``threshold``; "mask" leaves out what is above it.
        level: what that ratio is pooled over.
        threshold: largest factor, at least 1.
    """

    correction: Correction = "truncate"
    level: Literal["token", "turn", "sequence"] = "token"
    threshold: float = 2.0

    def __post_init__(self) -> None:
        if not self.threshold >= 1:
            raise ConfigurationError(f"objective.mismatch.threshold must be at least 1, got {self.threshold}")

    def factor(self, batch: RolloutBatch) -> Tensor:
        """Factor of each token's loss, [B, T]; ``batch`` must have the trainer's own log-probabilities."""
        assert batch.old_logprobs is not None
        settings = (self.correction, self.level, self.threshold)
        return mismatch_correction(
            batch.old_logprobs, batch.behaviour_logprobs, batch.turn, *settings, trajectory=batch.trajectory
        )


def mismatch_kl(batch: RolloutBatch) -> Tensor:
    """KL of the engine's distribution from the trainer's at each generated token, k3, nats, [B, T]."""
    assert batch.old_logprobs is not None
    divergence = sampled_divergence(batch.behaviour_logprobs, batch.old_logprobs, "k3")
    return torch.where(batch.generated, divergence, 0)
