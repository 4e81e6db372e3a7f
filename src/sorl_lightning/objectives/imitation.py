"""Cross-entropy on an expert's turns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.functional.losses import weighted_sum
from sorl_lightning.functional.turns import pooled
from sorl_lightning.objectives.objective import Metrics, Objective
from sorl_lightning.types import LossTerms, RolloutBatch, Trajectory


@dataclass(frozen=True, kw_only=True)
class Imitation(Objective):
    """Cross-entropy on the tokens of an expert's turns: the warm start, from an ExpertEngine or a DAggerEngine.

    Args:
        expert_turns_only: leave out turns that the engine chose with a probability below one half: the mistakes of an
            ``ExpertEngine``, the policy's turns of a ``DAggerEngine``. They are played, and not imitated.
    """

    expert_turns_only: bool = False

    @property
    def needs_reference(self) -> bool:
        """Never."""
        return False

    def check(self, group_size: int) -> None:
        """An expert's siblings are copies of one another.

        Raises:
            ConfigurationError: more than one sibling a task.
        """
        if group_size != 1:
            raise ConfigurationError(f"objective Imitation trains one path a task: data.group_size=1, got {group_size}")

    def advantages(self, trajectories: Sequence[Trajectory]) -> Tensor:
        """All ones: every path counts alike."""
        return torch.ones(len(trajectories))

    def terms(
        self, batch: RolloutBatch, logprobs: Tensor, entropy: Tensor, weights: Tensor
    ) -> tuple[LossTerms, Metrics]:
        """Mean negative log-likelihood under ``weights``, nats per token."""
        if self.expert_turns_only:
            chosen = pooled(batch.behaviour_logprobs, batch.turn, batch.trajectory, reduction="sum") >= math.log(0.5)
            weights = torch.where(chosen & batch.generated, weights, 0.0)
        return LossTerms(policy=weighted_sum(-logprobs, weights)), {"nll": -logprobs.detach()}

    def held_out(self, batch: RolloutBatch, logprobs: Tensor) -> Metrics:
        """Negative log-likelihood of what was played: the expert's, if ``data.validation.engine`` is one."""
        return {"nll": -logprobs}
