"""Imitation of an expert who is pushed off the path: mistakes are played, but never imitated."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from sorl_lightning.functional.losses import weighted_sum
from sorl_lightning.functional.turns import pooled
from sorl_lightning.objectives import Imitation, Metrics
from sorl_lightning.types import LossTerms, RolloutBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImitationOfExpertTurns(Imitation):
    """Cross-entropy on the turns that the expert chose.

    ``ExpertEngine(mistakes)`` reports the probability with which it chose an action: at least 1 - mistakes for the
    expert's own, less for a mistake. Turns below one half weigh nothing.
    """

    def terms(
        self, batch: RolloutBatch, logprobs: Tensor, entropy: Tensor, weights: Tensor
    ) -> tuple[LossTerms, Metrics]:
        chosen = pooled(batch.behaviour_logprobs, batch.turn, batch.trajectory, reduction="sum") >= math.log(0.5)
        kept = torch.where(chosen & batch.generated, weights, 0.0)
        return LossTerms(policy=weighted_sum(-logprobs, kept)), {"nll": -logprobs.detach()}
