"""On-policy distillation: the student's own turns, the teacher's opinion of every token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import get_args

import torch
from torch import Tensor

from sorl_lightning.control import LossMix
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.functional.losses import clip_bias, clipped_surrogate, weighted, weighted_sum
from sorl_lightning.functional.ratios import importance_ratio
from sorl_lightning.networks import Readout, predicted
from sorl_lightning.objectives.objective import Metrics, TeacherObjective
from sorl_lightning.objectives.policy_gradient import PolicyGradient
from sorl_lightning.objectives.teacher_divergence import SAMPLED, TOP_K, Divergence, TeacherTokens
from sorl_lightning.types import LossTerms, RolloutBatch, Trajectory


@dataclass(frozen=True, kw_only=True)
class Distillation(TeacherObjective):
    """Bring the student's distribution to the teacher's, on turns that the student played.

    Turns that the teacher played (GuidedOPD) train by the forward KL of the same family. The reverse KL over the full
    vocabulary is vanilla on-policy distillation.

    Args:
        divergence: over the whole vocabulary, of a teacher in this process: "reverse_kl", "forward_kl", "jsd". Over
            the teacher's top K, for any teacher: "topk_reverse_kl_tail", "topk_forward_kl_tail", in which all other
            tokens are one more outcome, and "topk_reverse_kl" without it, which replicates published runs. From the
            sampled token alone: "k1", an advantage of -k1 under the clipped surrogate; "k2", whose expected gradient is
            the reverse KL's; "k3", whose gradient is the forward KL's.
        beta: weight of the teacher in "jsd".
        top_k: K; more than the vocabulary takes all of it.
        temperature: of both distributions in the divergence; None is that of the rollouts, the only one for k1 to k3.
        ratio_clip: each token's loss is multiplied by its importance ratio, held to these bounds, which is 1 where data
            are on-policy; None leaves it out. "k1" has the surrogate's clip instead.
        epsilon_low: clip range of "k1" below 1; epsilon_high: above 1.
        reward: adds this policy gradient on rewards, in the proportion of the knob ``mix``; None trains on the teacher
            alone.

    Source: Zhou et al. 2026, arXiv:2607.05804; the tail and "jsd" as in ``functional.divergences``.
    """

    divergence: Divergence = "reverse_kl"
    beta: float = 0.5
    top_k: int = 50
    temperature: float | None = None
    ratio_clip: tuple[float, float] | None = (0.1, 10.0)
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    reward: PolicyGradient | None = None
    mix: LossMix = field(default_factory=LossMix, init=False, compare=False)

    def __post_init__(self) -> None:
        if self.divergence not in get_args(Divergence):
            raise ConfigurationError(f"objective.divergence must be in {get_args(Divergence)}: {self.divergence!r}")
        if not 0 <= self.beta <= 1:
            raise ConfigurationError(f"objective.beta must be in [0, 1], got {self.beta}")
        if self.top_k < 1:
            raise ConfigurationError(f"objective.top_k must be at least 1, got {self.top_k}")
        if self.temperature is not None and (not self.temperature > 0 or self.divergence in SAMPLED):
            raise ConfigurationError(
                f"objective.temperature must be above 0, and unset with {', '.join(SAMPLED)}, whose tokens were "
                f"sampled at data.temperature; got {self.temperature} with {self.divergence!r}"
            )
        if self.ratio_clip is not None and not 0 <= self.ratio_clip[0] <= 1 <= self.ratio_clip[1]:
            raise ConfigurationError(f"objective.ratio_clip must be [low <= 1, high >= 1], got {self.ratio_clip}")
        if not (self.epsilon_low > 0 and self.epsilon_high > 0):
            raise ConfigurationError(
                f"objective.epsilon_low and epsilon_high must be above 0: {self.epsilon_low}, {self.epsilon_high}"
            )

    @property
    def needs_reference(self) -> bool:
        """Where the policy gradient does."""
        return self.reward is not None and self.reward.needs_reference

    @property
    def needs_old_logprobs(self) -> bool:
        """Where the policy gradient does."""
        return self.reward is not None and self.reward.needs_old_logprobs

    @property
    def pools_trajectories(self) -> bool:
        """Where the policy gradient does."""
        return self.reward is not None and self.reward.pools_trajectories

    @property
    def needs_critic(self) -> bool:
        """Where the policy gradient does."""
        return self.reward is not None and self.reward.needs_critic

    @property
    def recorded_top_k(self) -> int | None:
        """K for the top-K names, 0 for the sampled ones, None for the full vocabulary."""
        if self.divergence in TOP_K:
            return self.top_k
        return 0 if self.divergence in SAMPLED else None

    def check(self, group_size: int) -> None:
        """Refuse what the policy gradient refuses; distillation alone takes any number of siblings."""
        if self.reward is not None:
            self.reward.check(group_size)

    def advantages(self, trajectories: Sequence[Trajectory]) -> Tensor:
        """Those of the policy gradient; zeros without one."""
        return torch.zeros(len(trajectories)) if self.reward is None else self.reward.advantages(trajectories)

    def token_rewards(self, rows: RolloutBatch) -> Tensor:
        """Those of the policy gradient."""
        return rows.rewards if self.reward is None else self.reward.token_rewards(rows)

    def tempered(self, temperature: float) -> float:
        """The objective's own temperature, else that of the rollouts."""
        return temperature if self.temperature is None else self.temperature

    def compare(
        self, batch: RolloutBatch, teacher: Readout | None, temperature: float
    ) -> Callable[[Readout, Tensor], Tensor]:
        """The divergence at each token; where the teacher played, the forward KL of the same family."""
        mask = predicted(batch.generated)
        scores = None
        if batch.teacher is not None:
            scores = batch.teacher.ids[mask], batch.teacher.logprobs[mask], batch.teacher.sampled_logprobs[mask]
        tokens = TeacherTokens(
            teacher=teacher,
            scores=scores,
            divergence=self.divergence,
            beta=self.beta,
            temperature=self.tempered(temperature),
        )
        if batch.by_teacher is None:
            return tokens.compared
        guided = batch.by_teacher[mask]
        return lambda student, logprobs: tokens.compared_by_author(student, logprobs, guided)

    def terms(
        self, batch: RolloutBatch, logprobs: Tensor, entropy: Tensor, weights: Tensor
    ) -> tuple[LossTerms, Metrics]:
        """The weighted divergence, or for "k1" its surrogate; beside it the policy gradient, where there is one."""
        ratio = importance_ratio(logprobs, batch.behaviour_logprobs, batch.turn, "token", False, batch.trajectory)
        assert batch.comparison is not None
        divergence = batch.comparison.divergence
        metrics: dict[str, Tensor] = {"divergence": divergence.detach(), "ratio": ratio.detach()}
        terms = self._surrogate(batch, ratio, divergence, weights) if self.divergence == "k1" else LossTerms(
            policy=weighted_sum(self._corrected(batch, ratio, divergence), weights)
        )  # fmt: skip
        if terms.clipped is not None:
            metrics["clip_fraction"] = terms.clipped.float()
        if self.reward is None:
            return dataclasses.replace(terms, policy=self.mix.distillation * terms.policy), metrics
        rewarded, more = self.reward.terms(batch, logprobs, entropy, weights)
        return self._mixed(terms, rewarded), {**metrics, **more}

    def held_out(self, batch: RolloutBatch, logprobs: Tensor) -> Metrics:
        """The divergence on what the student played."""
        assert batch.comparison is not None
        return {"divergence": batch.comparison.divergence}

    def _corrected(self, batch: RolloutBatch, ratio: Tensor, divergence: Tensor) -> Tensor:
        if self.ratio_clip is None:
            return divergence
        ratio = ratio.detach().clamp(*self.ratio_clip)
        return divergence * (ratio if batch.by_teacher is None else ratio.masked_fill(batch.by_teacher, 1.0))

    def _surrogate(self, batch: RolloutBatch, ratio: Tensor, divergence: Tensor, weights: Tensor) -> LossTerms:
        """Policy gradient with advantage -k1; the teacher's own tokens are imitated."""
        loss, clipped = clipped_surrogate(ratio, -divergence, self.epsilon_low, self.epsilon_high)
        clipped = clipped & batch.generated
        if batch.by_teacher is not None:
            loss, clipped = torch.where(batch.by_teacher, divergence, loss), clipped & ~batch.by_teacher
        policy, bias = weighted(loss, weights), weighted(clip_bias(ratio, -divergence, clipped), weights)
        bias = self.mix.distillation * bias
        return LossTerms(
            policy=policy.sum(),
            clip_bias=bias.sum(),
            clipped=clipped,
            policy_by_token=self.mix.distillation * policy,
            clip_bias_by_token=bias,
            weights=weights,
        )

    def _mixed(self, distilled: LossTerms, rewarded: LossTerms) -> LossTerms:
        """Both losses. The divergence is a regularizer, whose size no normalization of the policy gradient touches."""
        parts = [self.mix.distillation * distilled.policy]
        if rewarded.regularizer is not None:
            parts.append(self.mix.reward * rewarded.regularizer)
        assert rewarded.clip_bias is not None
        assert rewarded.policy_by_token is not None
        assert rewarded.clip_bias_by_token is not None
        return LossTerms(
            policy=self.mix.reward * rewarded.policy,
            regularizer=sum(parts[1:], parts[0]),
            clip_bias=self.mix.reward * rewarded.clip_bias,
            clipped=rewarded.clipped,
            policy_by_token=self.mix.reward * rewarded.policy_by_token,
            clip_bias_by_token=self.mix.reward * rewarded.clip_bias_by_token,
            weights=rewarded.weights,
        )
