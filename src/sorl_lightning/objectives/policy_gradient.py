"""Clipped policy gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.functional.advantages import group_advantages, leave_one_out
from sorl_lightning.functional.divergences import sampled_divergence
from sorl_lightning.functional.losses import clip_bias, clipped_surrogate, weighted_sum
from sorl_lightning.functional.ratios import importance_ratio
from sorl_lightning.objectives.objective import Metrics, Objective
from sorl_lightning.types import LossTerms, RolloutBatch, Trajectory


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(Objective):
    """Clipped policy gradient: GRPO, RLOO, GSPO and, with turn-level ratios, Turn-GRPO.

    With the callback ClippingTriggeredNormalization, ratio "turn" is SO-GRPO and ratio "token" is S-GRPO.

    Args:
        ratio: pooling of the importance ratio.
        advantage: "grpo" (group mean and unbiased standard deviation), "grpo_no_std" (mean only; Dr.GRPO), "rloo"
            (leave one out), "reward" (no baseline).
        epsilon_low: the ratio is clipped below 1 - epsilon_low.
        epsilon_high: the ratio is clipped above 1 + epsilon_high.
        token_gradient: turn or sequence ratio in value, gradient of the token alone.
        kl_coefficient: weight of the KL to the reference in the loss; 0 needs no reference model.
        kl_estimator: "k2" has the gradient of the reverse KL, "k3" that of the forward KL.
        entropy_coefficient: weight of the entropy bonus.

    Source: Li et al. 2025, arXiv:2511.20718, as reconstructed in docs/papers/sorl.md.
    """

    ratio: Literal["token", "turn", "turn_sum", "sequence"] = "turn"
    advantage: Literal["grpo", "grpo_no_std", "rloo", "reward"] = "grpo"
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    token_gradient: bool = False
    kl_coefficient: float = 0.0
    kl_estimator: Literal["k2", "k3"] = "k2"
    entropy_coefficient: float = 0.0

    def __post_init__(self) -> None:
        for name in ("epsilon_low", "epsilon_high"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"objective.{name} must be above 0, got {getattr(self, name)}")
        for name in ("kl_coefficient", "entropy_coefficient"):
            if not getattr(self, name) >= 0:
                raise ConfigurationError(f"objective.{name} must be 0 or more, got {getattr(self, name)}")

    @property
    def needs_reference(self) -> bool:
        """Whether the KL term is on."""
        return self.kl_coefficient > 0

    def check(self, group_size: int) -> None:
        """Group baselines need a group.

        Raises:
            ConfigurationError: a baseline over siblings where there are none: every advantage would be 0.
        """
        if self.advantage != "reward" and group_size < 2:
            raise ConfigurationError(
                f"objective.advantage={self.advantage!r} compares siblings of a task, so data.group_size must be "
                f"at least 2, got {group_size}"
            )

    def advantages(self, trajectories: Sequence[Trajectory]) -> Tensor:
        """Advantage of each trajectory from its reward and its siblings' rewards."""
        rewards = torch.tensor([trajectory.reward for trajectory in trajectories], dtype=torch.float32)
        groups = torch.tensor([trajectory.group for trajectory in trajectories])
        if self.advantage == "reward":
            return rewards
        if self.advantage == "rloo":
            return leave_one_out(rewards, groups)
        return group_advantages(rewards, groups, scale="std" if self.advantage == "grpo" else "none")

    def terms(
        self, batch: RolloutBatch, logprobs: Tensor, entropy: Tensor, weights: Tensor
    ) -> tuple[LossTerms, Metrics]:
        """The clipped surrogate, its clipping bias, and the regularizers."""
        ratio = importance_ratio(
            logprobs, batch.behaviour_logprobs, batch.turn, self.ratio, self.token_gradient, batch.trajectory
        )
        loss, clipped = clipped_surrogate(ratio, batch.advantages, self.epsilon_low, self.epsilon_high)
        clipped = clipped & batch.generated
        regularizer, metrics = self._regularizer(batch, logprobs, entropy, weights)
        terms = LossTerms(
            policy=weighted_sum(loss, weights),
            regularizer=regularizer,
            clip_bias=weighted_sum(clip_bias(ratio, batch.advantages, clipped), weights),
            clipped=clipped,
        )
        return terms, {"ratio": ratio.detach(), "clip_fraction": clipped.float(), **metrics}

    def _regularizer(
        self, batch: RolloutBatch, logprobs: Tensor, entropy: Tensor, weights: Tensor
    ) -> tuple[Tensor | None, Metrics]:
        parts: list[Tensor] = []
        metrics: dict[str, Tensor] = {}
        if batch.reference_logprobs is not None:
            divergence = sampled_divergence(logprobs, batch.reference_logprobs, self.kl_estimator)
            metrics["reference_kl"] = (logprobs - batch.reference_logprobs).detach()
            parts.append(self.kl_coefficient * weighted_sum(divergence, weights))
        if self.entropy_coefficient:
            parts.append(-self.entropy_coefficient * weighted_sum(entropy, weights))
        return (sum(parts[1:], parts[0]) if parts else None), metrics
