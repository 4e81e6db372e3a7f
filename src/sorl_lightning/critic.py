"""The critic: values of states, advantages by GAE from them, and what its values are trained towards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from sorl_lightning import ranks
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.functional.advantages import gae, whiten
from sorl_lightning.functional.losses import clipped_value_loss, weighted_sum
from sorl_lightning.functional.turns import fill
from sorl_lightning.models import ModelSource
from sorl_lightning.types import RolloutBatch
from sorl_lightning.value_networks import ValueHead, ValueNetwork


@dataclass(frozen=True, kw_only=True)
class Critic:
    """A value of every state, learnt beside the policy; for ``objective.advantage: gae``.

    Args:
        backbone: "own": a model of its own; "policy": a linear head on the policy's last hidden state, whose gradient
            the policy shares.
        source: where the own backbone comes from; None: where the policy does.
        lr: learning rate of the critic's own parameters, a group of the one optimiser; None: the policy's.
        gamma: discount per generated token, in [0, 1].
        lam: decay of GAE, in [0, 1].
        whiten: bring advantages to mean 0 and variance 1 over the generated tokens of a collection.
        epsilon: how far a value may move in one collection before its gradient ends; None lets it.
        coefficient: weight of the value loss.
        warmup: collections at the start in which the critic alone is trained.

    Source: Schulman et al. 2016, arXiv:1506.02438 (GAE); Schulman et al. 2017, arXiv:1707.06347 (PPO).
    """

    backbone: Literal["own", "policy"] = "own"
    source: ModelSource | None = None
    lr: float | None = None
    gamma: float = 1.0
    lam: float = 1.0
    whiten: bool = True
    epsilon: float | None = 0.2
    coefficient: float = 0.5
    warmup: int = 0

    def __post_init__(self) -> None:
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigurationError(f"critic.{name} must be in [0, 1], got {getattr(self, name)}")
        for name in ("lr", "epsilon", "coefficient"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ConfigurationError(f"critic.{name} must be above 0, got {getattr(self, name)}")
        if self.warmup < 0:
            raise ConfigurationError(f"critic.warmup must be 0 or more collections, got {self.warmup}")
        if self.backbone == "policy" and self.source is not None:
            raise ConfigurationError(
                "critic.source is the model of an own backbone: leave it out with backbone='policy'"
            )

    def network(self, policy_source: ModelSource, policy: PreTrainedModel) -> ValueHead | ValueNetwork:
        """What gives the values, untrained."""
        if self.backbone == "policy":
            return ValueHead(policy)
        return ValueNetwork((self.source or policy_source).load()[0])

    def parameter_group(self, network: nn.Module) -> dict[str, Any]:
        """The network's trainable parameters as an optimiser takes them, with their learning rate if it has one."""
        group: dict[str, Any] = {"params": [p for p in network.parameters() if p.requires_grad]}
        return group if self.lr is None else {**group, "lr": self.lr}

    def estimate(self, rows: RolloutBatch, after: Tensor, rewards: Tensor, truncated: Tensor) -> RolloutBatch:
        """``rows`` with values, returns and advantages.

        Args:
            rows: all rows of all trajectories.
            after: value of the state after each token, float [B, T].
            rewards: reward at each token, float [B, T].
            truncated: trajectories that were cut short, bool [N]: they bootstrap from the value after their last token.
        """
        tokens = JoinedTokens.of(rows.turn, rows.trajectory, len(truncated))
        before = after.roll(1, dims=1)
        bootstrap = torch.where(truncated, tokens.last(after), 0)
        turn = torch.where(tokens.mask, 0, -1)
        advantages, returns = gae(tokens.join(rewards), tokens.join(before), turn, bootstrap, self.gamma, self.lam)
        advantages = tokens.split(advantages)
        if self.whiten:
            everyone = ranks.pooled(advantages[rows.generated], lambda values: whiten(values[None], _all(values))[0])
            advantages = fill(rows.generated, everyone)
        return rows.replace(
            values=torch.where(rows.generated, before, 0),
            returns=tokens.split(returns),
            advantages=advantages,
        )

    def loss(self, batch: RolloutBatch, values: Tensor, weights: Tensor) -> Tensor:
        """Clipped value loss under ``weights``, times the coefficient."""
        assert batch.values is not None
        assert batch.returns is not None
        error = clipped_value_loss(values, batch.values.to(values), batch.returns.to(values), self.epsilon)
        return self.coefficient * weighted_sum(error, weights)


@dataclass(frozen=True, kw_only=True)
class JoinedTokens:
    """Where the generated tokens of rows go when each trajectory becomes one row of generated tokens alone.

    Attributes:
        generated: where they are in the rows.
        trajectory: trajectory of each of the G tokens, step: its position among that trajectory's tokens.
        mask: where there is a token, for each trajectory.
    """

    generated: Bool[Tensor, "B T"]
    trajectory: Int[Tensor, "G"]
    step: Int[Tensor, "G"]
    mask: Bool[Tensor, "N L"]

    @classmethod
    def of(cls, turn: Tensor, trajectory: Tensor, count: int) -> JoinedTokens:
        """Rows of one trajectory stand in the order of its turns."""
        generated = turn >= 0
        index = trajectory[generated]
        sizes = torch.bincount(index, minlength=count)
        order = index.argsort(stable=True)
        step = torch.empty_like(index)
        step[order] = torch.arange(len(index)) - (sizes.cumsum(0) - sizes)[index[order]]
        mask = torch.arange(max(1, int(sizes.max()))) < sizes[:, None]
        return cls(generated=generated, trajectory=index, step=step, mask=mask)

    def join(self, values: Float[Tensor, "B T"]) -> Float[Tensor, "N L"]:
        """The generated tokens' values, one row a trajectory."""
        joined = values.new_zeros(self.mask.shape)
        joined[self.trajectory, self.step] = values[self.generated]
        return joined

    def split(self, joined: Float[Tensor, "N L"]) -> Float[Tensor, "B T"]:
        """The way back; 0 at tokens that were not generated."""
        return fill(self.generated, joined[self.trajectory, self.step])

    def last(self, values: Float[Tensor, "B T"]) -> Float[Tensor, "N"]:
        """The value at the last generated token of each trajectory; 0 where there is none."""
        index = (self.mask.sum(1, keepdim=True) - 1).clamp(min=0)
        return self.join(values).gather(1, index)[:, 0]


def _all(values: Tensor) -> Tensor:
    """Turns of one row in which every token was generated."""
    return torch.zeros(1, len(values), dtype=torch.long)


def explained_variance(rows: RolloutBatch) -> float:
    """1 - Var(returns - values) / Var(returns) over the generated tokens of all ranks: 1 is a perfect critic."""
    assert rows.values is not None
    assert rows.returns is not None
    own = torch.stack([rows.returns[rows.generated].double(), rows.values[rows.generated].double()])
    returns, values = torch.cat(ranks.gather(own), dim=1)
    spread = returns.var(correction=0) if len(returns) else torch.zeros(())
    return float(1 - (returns - values).var(correction=0) / spread) if spread > 0 else 0.0
