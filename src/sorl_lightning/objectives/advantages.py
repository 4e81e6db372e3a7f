"""Advantages from rewards alone: each kind a function of finished trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from sorl_lightning import ranks
from sorl_lightning.functional.advantages import group_advantages, leave_one_out, returns_to_go
from sorl_lightning.types import Trajectory

Kind = Literal[
    "grpo", "grpo_no_std", "rloo", "reinforce++", "reinforce++_baseline", "reward", "turn_return", "gigpo", "gae"
]
GROUP_KINDS = ("grpo", "grpo_no_std", "rloo", "reinforce++_baseline", "turn_return", "gigpo")
TURN_KINDS = ("turn_return", "gigpo")


def advantages_of(trajectories: Sequence[Trajectory], kind: Kind, turn_discount: float = 1.0) -> Tensor:
    """Advantages of ``kind``, float32 [N] or, for the kinds of single turns, [N, K] with 0 after the last turn.

    Constant groups and groups of one are exactly 0 in all kinds that compare siblings.
    """
    rewards = torch.tensor([trajectory.reward for trajectory in trajectories], dtype=torch.float32)
    groups = torch.tensor([trajectory.group for trajectory in trajectories], dtype=torch.long)
    if kind in TURN_KINDS and not trajectories:
        return torch.zeros(0, 1)
    if kind == "turn_return":
        return turn_return(trajectories, turn_discount)
    if kind == "gigpo":
        return group_advantages(rewards, groups)[:, None] + step_advantages(trajectories, turn_discount)
    if kind == "rloo":
        return leave_one_out(rewards, groups)
    if kind == "reinforce++":
        return ranks.pooled(rewards, _whitened)
    if kind == "reinforce++_baseline":
        return whitened_baseline(rewards, groups)
    if kind == "reward":
        return rewards
    return group_advantages(rewards, groups, scale="std" if kind == "grpo" else "none")


def whitened_baseline(rewards: Tensor, groups: Tensor) -> Tensor:
    """Rewards less their group's mean, divided by one standard deviation over all groups; constant groups stay 0.

    Source: Hu 2025, arXiv:2501.03262 (REINFORCE++-baseline).
    """
    centred = group_advantages(rewards, groups, scale="none")
    return torch.where(centred == 0, 0, ranks.pooled(centred, _whitened))


def _whitened(values: Tensor) -> Tensor:
    return group_advantages(values, torch.zeros(len(values), dtype=torch.long))


def turn_return(trajectories: Sequence[Trajectory], discount: float) -> Tensor:
    """Discounted return from each turn on, relative to those of all turns of all siblings; [N, K].

    Source: Shao et al. 2024, arXiv:2402.03300, sec. 4.1.3 (process supervision), with turns as the steps; ours where
    discounted.
    """
    returns, played = _returns(trajectories, discount)
    groups = torch.tensor([trajectory.group for trajectory in trajectories])[:, None].expand_as(returns)
    return _among(returns, groups, played)


def step_advantages(trajectories: Sequence[Trajectory], discount: float) -> Tensor:
    """Discounted return from each turn on, relative to siblings' turns that had read the same observation; [N, K].

    A turn whose observation no other turn of the group had read is a group of one: 0.

    Source: Feng et al. 2025, arXiv:2505.10978 (GiGPO), eq. 7.
    """
    returns, played = _returns(trajectories, discount)
    numbers: dict[tuple[int, str | None], int] = {}
    groups = torch.zeros(returns.shape, dtype=torch.long)
    for index, trajectory in enumerate(trajectories):
        read: str | None = None  # the opening, which all siblings share
        for turn in trajectory.turns:
            groups[index, turn.index] = numbers.setdefault((trajectory.group, read), len(numbers))
            read = turn.observation
    return _among(returns, groups, played)


def _returns(trajectories: Sequence[Trajectory], discount: float) -> tuple[Tensor, Tensor]:
    """Return from each turn on, and whether the turn was played; both [N, K]."""
    rewards = [torch.tensor(trajectory.turn_rewards, dtype=torch.float32) for trajectory in trajectories]
    padded = torch.nn.utils.rnn.pad_sequence(rewards, batch_first=True)
    turns = torch.tensor([len(trajectory.turns) for trajectory in trajectories])
    return returns_to_go(padded, discount), torch.arange(padded.shape[1]) < turns[:, None]


def _among(returns: Tensor, groups: Tensor, played: Tensor) -> Tensor:
    advantages = torch.zeros_like(returns)
    advantages[played] = group_advantages(returns[played], groups[played])
    return advantages
