"""The clipped policy gradient in all its variants."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.functional.divergences import sampled_divergence
from sorl_lightning.functional.losses import clip_bias, clipped_surrogate, weighted, weighted_sum
from sorl_lightning.functional.ratios import Level, importance_ratio
from sorl_lightning.functional.turns import pooled
from sorl_lightning.objectives.advantages import GROUP_KINDS, TURN_KINDS, Kind, advantages_of
from sorl_lightning.objectives.mismatch import Mismatch, mismatch_kl
from sorl_lightning.objectives.objective import Metrics, Objective
from sorl_lightning.types import LossTerms, RolloutBatch, Trajectory


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(Objective):
    """Clipped policy gradient: PPO, GRPO, RLOO, GSPO, Dr.GRPO, DAPO and, with turn-level ratios, Turn-PPO, Turn-GRPO.

    With the callback ClippingTriggeredNormalization, ratio "turn" is SO-PPO or SO-GRPO and ratio "token" S-PPO or
    S-GRPO.

    Args:
        ratio: pooling of the importance ratio. "turn_sum" explodes with the length of a turn and needs ``i_know``.
        advantage: "grpo" (group mean and unbiased standard deviation), "grpo_no_std" (mean only; Dr.GRPO), "rloo"
            (leave one out), "reinforce++" (mean and deviation of all trajectories), "reinforce++_baseline" (group mean,
            deviation of all), "reward" (no baseline), "turn_return" (return from each turn on, compared with siblings'
            turns), "gigpo" (grpo, plus returns compared among turns that read the same observation), "gae" (from
            ``model.critic``).
        turn_discount: discount per turn of "turn_return" and "gigpo".
        advantage_pooling: "turn" replaces each advantage by its turn's mean before the clip.
        epsilon_low: the ratio is clipped below 1 - epsilon_low.
        epsilon_high: the ratio is clipped above 1 + epsilon_high.
        dual_clip: largest ratio at a negative advantage; None sets no bound.
        token_gradient: turn or sequence ratio in value, gradient of the token alone.
        old: what ratios are taken to: "engine", the log-probabilities that came with the tokens; "recompute", the
            trainer's own at the start of the collection, with the engine's mismatch logged.
        mismatch: correction of that mismatch; needs old "recompute".
        kl_coefficient: weight of the KL to the reference; 0 needs no reference model.
        kl_in: "loss", or "reward": k1 is taken off each token's reward, which needs advantage "gae".
        kl_estimator: in the loss. "k2" has the gradient of the reverse KL, "k3" that of the forward KL.
        kl_on: tokens that the KL in the loss is taken at: "all", or "signal", those whose advantage is not 0, so that
            groups without signal pull on nothing.
        entropy_coefficient: weight of the entropy bonus.
        i_know: allows the ratio "turn_sum".

    Source: Li et al. 2025, arXiv:2511.20718, as reconstructed in docs/papers/sorl.md.
    """

    ratio: Level = "turn"
    advantage: Kind = "grpo"
    turn_discount: float = 1.0
    advantage_pooling: Literal["none", "turn"] = "none"
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    dual_clip: float | None = None
    token_gradient: bool = False
    old: Literal["engine", "recompute"] = "engine"
    mismatch: Mismatch | None = None
    kl_coefficient: float = 0.0
    kl_in: Literal["loss", "reward"] = "loss"
    kl_estimator: Literal["k2", "k3"] = "k2"
    kl_on: Literal["all", "signal"] = "all"
    entropy_coefficient: float = 0.0
    i_know: bool = False

    def __post_init__(self) -> None:
        for name in ("epsilon_low", "epsilon_high"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigurationError(f"objective.{name} must be above 0 and finite, got {getattr(self, name)}")
        for name in ("kl_coefficient", "entropy_coefficient"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigurationError(f"objective.{name} must be 0 or more and finite, got {getattr(self, name)}")
        if not 0 <= self.turn_discount <= 1:
            raise ConfigurationError(f"objective.turn_discount must be in [0, 1], got {self.turn_discount}")
        for holds, sentence in (*self._ratio_rules(), *self._kl_rules(), *self._rules_of_what_is_read()):
            if not holds:
                raise ConfigurationError(sentence)

    def _ratio_rules(self) -> list[tuple[bool, str]]:
        """What must hold between settings of the ratio, and what to say where it does not."""
        return [
            (
                self.ratio != "turn_sum" or self.i_know,
                "objective.ratio='turn_sum' multiplies the ratios of a turn's tokens and explodes with its length: "
                "take 'turn', or say objective.i_know=true",
            ),
            (
                self.dual_clip is None or self.dual_clip > 1 + self.epsilon_high,
                f"objective.dual_clip={self.dual_clip} must be above 1 + epsilon_high={1 + self.epsilon_high:g}",
            ),
            (
                self.mismatch is None or self.old == "recompute",
                "objective.mismatch corrects the engine's log-probabilities by the trainer's own, so objective.old "
                f"must be 'recompute', got {self.old!r}",
            ),
        ]

    def _kl_rules(self) -> list[tuple[bool, str]]:
        """The same of the KL to the reference."""
        return [
            (
                self.kl_in == "loss" or self.advantage == "gae",
                "objective.kl_in='reward' changes the reward of single tokens, which only objective.advantage='gae' "
                f"reads, got {self.advantage!r}: use kl_in='loss'",
            ),
            (
                self.kl_in == "loss" or self.kl_coefficient > 0,
                "objective.kl_in='reward' takes nothing off the reward at objective.kl_coefficient=0: set the "
                "coefficient, or leave kl_in out",
            ),
            (
                self.kl_in == "loss" or (self.kl_estimator, self.kl_on) == ("k2", "all"),
                f"objective.kl_estimator={self.kl_estimator!r} and objective.kl_on={self.kl_on!r} shape the KL in the "
                "loss, and objective.kl_in='reward' takes k1 off the reward of every token: leave them out",
            ),
            (
                self.kl_on == "all" or self.kl_coefficient > 0,
                f"objective.kl_on={self.kl_on!r} needs a KL term, and objective.kl_coefficient=0 has none",
            ),
        ]

    def _rules_of_what_is_read(self) -> list[tuple[bool, str]]:
        """The same of settings that others leave without a reader."""
        return [
            (
                self.advantage_pooling == "none" or self.advantage == "gae",
                "objective.advantage_pooling='turn' averages the advantages of a turn, which differ within one under "
                f"objective.advantage='gae' only, got {self.advantage!r}: leave it out",
            ),
            (
                not self.i_know or self.ratio == "turn_sum",
                f"objective.i_know=true allows objective.ratio='turn_sum', got {self.ratio!r}: leave it out",
            ),
            (
                self.turn_discount == 1 or self.advantage in TURN_KINDS,
                f"objective.turn_discount={self.turn_discount} is read by the advantages {' and '.join(TURN_KINDS)} "
                f"only, got {self.advantage!r}",
            ),
            (
                not self.token_gradient or self.ratio != "token",
                "objective.token_gradient changes nothing with objective.ratio='token': leave it out",
            ),
        ]

    @property
    def needs_reference(self) -> bool:
        """Whether there is a KL term."""
        return self.kl_coefficient > 0

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether ratios are taken to the trainer's own log-probabilities."""
        return self.old == "recompute"

    @property
    def needs_critic(self) -> bool:
        """Whether advantages come from a critic."""
        return self.advantage == "gae"

    @property
    def pools_trajectories(self) -> bool:
        """Whether a ratio is pooled over whole trajectories."""
        return "sequence" in (self.ratio, self.mismatch.level if self.mismatch else None)

    def check(self, group_size: int) -> None:
        """Group baselines need a group.

        Raises:
            ConfigurationError: a baseline over siblings where there are none: every advantage would be 0.
        """
        if self.advantage in GROUP_KINDS and group_size < 2:
            raise ConfigurationError(
                f"objective.advantage={self.advantage!r} compares siblings of a task, so data.group_size must be "
                f"at least 2, got {group_size}"
            )

    def advantages(self, trajectories: Sequence[Trajectory]) -> Tensor:
        """Advantage of each trajectory, or each of its turns, from rewards alone.

        Raises:
            ConfigurationError: they are a critic's.
        """
        if self.advantage == "gae":
            raise ConfigurationError("objective.advantage='gae' needs a critic: set model.critic")
        return advantages_of(trajectories, self.advantage, self.turn_discount)

    def token_rewards(self, rows: RolloutBatch) -> Tensor:
        """Rewards, less the KL to the reference where it belongs there."""
        if self.kl_in == "loss" or rows.reference_logprobs is None:
            return rows.rewards
        divergence = sampled_divergence(_old(rows), rows.reference_logprobs, "k1")
        return rows.rewards - self.kl_coefficient * torch.where(rows.generated, divergence, 0)

    def terms(
        self, batch: RolloutBatch, logprobs: Tensor, entropy: Tensor, weights: Tensor
    ) -> tuple[LossTerms, Metrics]:
        """The clipped surrogate, its clipping bias, and the regularizers."""
        old = _old(batch)
        ratio = importance_ratio(logprobs, old, batch.turn, self.ratio, self.token_gradient, batch.trajectory)
        advantages, metrics = self._corrected_advantages(batch)
        loss, clipped = clipped_surrogate(ratio, advantages, self.epsilon_low, self.epsilon_high, self.dual_clip)
        clipped = clipped & batch.generated
        regularizer, regularizer_metrics = self._regularizer(batch, logprobs, entropy, weights)
        policy, bias = weighted(loss, weights), weighted(clip_bias(ratio, advantages, clipped), weights)
        terms = LossTerms(
            policy=policy.sum(),
            regularizer=regularizer,
            clip_bias=bias.sum(),
            clipped=clipped,
            policy_by_token=policy,
            clip_bias_by_token=bias,
            weights=weights,
        )
        metrics |= {"ratio": ratio.detach(), "clip_fraction": clipped.float()}
        metrics["policy_kl"] = torch.where(batch.generated, sampled_divergence(old, logprobs.detach(), "k3"), 0)
        return terms, {**metrics, **regularizer_metrics}

    def _corrected_advantages(self, batch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Advantages as the loss takes them. A correction scales them, so that it leaves the clip set alone."""
        advantages, metrics = batch.advantages, {}
        if self.advantage_pooling == "turn":
            advantages = pooled(advantages, batch.turn, batch.trajectory)
        if batch.old_logprobs is not None:
            metrics["mismatch_kl"] = mismatch_kl(batch)
            if self.mismatch is not None:
                metrics["mismatch_factor"] = self.mismatch.factor(batch)
                advantages = advantages * metrics["mismatch_factor"]
        return advantages, metrics

    def _regularizer(
        self, batch: RolloutBatch, logprobs: Tensor, entropy: Tensor, weights: Tensor
    ) -> tuple[Tensor | None, Metrics]:
        parts: list[Tensor] = []
        metrics: dict[str, Tensor] = {}
        if batch.reference_logprobs is not None:
            metrics["reference_kl"] = (logprobs - batch.reference_logprobs).detach()
            if self.kl_in == "loss":
                at = batch.generated if self.kl_on == "all" else batch.generated & (batch.advantages != 0)
                # Elsewhere both are 0, and so are the divergence and its gradient, whatever stood there.
                own, reference = (torch.where(at, values, 0) for values in (logprobs, batch.reference_logprobs))
                parts.append(
                    self.kl_coefficient * weighted_sum(sampled_divergence(own, reference, self.kl_estimator), weights)
                )
        if self.entropy_coefficient:
            parts.append(-self.entropy_coefficient * weighted_sum(entropy, weights))
        return (sum(parts[1:], parts[0]) if parts else None), metrics


def _old(batch: RolloutBatch) -> Tensor:
    """Log-probabilities that ratios are taken to, nats."""
    return batch.behaviour_logprobs if batch.old_logprobs is None else batch.old_logprobs
