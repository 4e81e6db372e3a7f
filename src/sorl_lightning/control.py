"""Knobs, and the protocols through which callbacks reach them.

A knob has one owner, which reads it and logs it; a callback only sets it. Its rest value is the baseline, so leaving a
callback out *is* the ablation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sorl_lightning.teachers import Teacher
from sorl_lightning.types import LossTerms, RolloutBatch, TokenSignals, Trajectory, TurnProfile, TurnStatistics

Owner = TypeVar("Owner")


@dataclass(slots=True)
class RolloutBudget:
    """How deep training rollouts may go.

    Attributes:
        ceiling: the most turns that a run allows.
        max_turns: turns allowed to the next collection that starts; rests at the ceiling.
    """

    ceiling: int
    max_turns: int

    def limit(self, turns: int) -> None:
        """Allow ``turns`` turns from the next collection on, at least 1 and at most the ceiling."""
        self.max_turns = max(1, min(turns, self.ceiling))


@dataclass(slots=True)
class KLSchedule:
    """How the loss is shared out: 0 gives trajectories equal weight, 1 gives turns equal weight."""

    turn_blend: float = 0.0


@dataclass(slots=True)
class LossMix:
    """Factors of the distillation loss and of the policy gradient on rewards beside it."""

    distillation: float = 1.0
    reward: float = 1.0


@dataclass(slots=True)
class TurnWeighting:
    """What each token's weight is multiplied by, from what is known of it when rows are collected; None: nothing."""

    factor: Callable[[TokenSignals], Tensor] | None = None


@dataclass(slots=True)
class TurnAuthor:
    """Who plays the turns of training rollouts, beside the policy.

    Attributes:
        expert_prefix: from the turns of the expert's own way through a task, how many of them the expert plays before
            the policy takes over; None: none.
        teacher_probability: probability that the teacher plays a turn.
    """

    expert_prefix: Callable[[int], int] | None = None
    teacher_probability: float = 0.0


@runtime_checkable
class HasRolloutBudget(Protocol):
    """Owner of the rollout depth: the datamodule."""

    rollout_budget: RolloutBudget


@runtime_checkable
class HasKLSchedule(Protocol):
    """Owner of the loss blend: the module."""

    kl_schedule: KLSchedule


@runtime_checkable
class HasLossMix(Protocol):
    """Owner of the mix of losses: an objective that has two."""

    mix: LossMix


@runtime_checkable
class HasTurnWeighting(Protocol):
    """Owner of the weighting of turns: the module."""

    turn_weighting: TurnWeighting


@runtime_checkable
class HasTurnAuthor(Protocol):
    """Owner of who plays: the datamodule."""

    turn_author: TurnAuthor


@runtime_checkable
class HasTurnStatistics(Protocol):
    """Owner of what the collection in training showed turn by turn, complete when its epoch ends: the module."""

    turn_statistics: TurnStatistics | None
    turn_profile: TurnProfile | None


@runtime_checkable
class HasTeacher(Protocol):
    """Owner of the teacher: the module."""

    teacher: Teacher | None


@runtime_checkable
class HasClipBias(Protocol):
    """Owner of the loss terms of the micro-batch in flight that reach the policy's parameters: the module."""

    loss_terms: LossTerms | None


@runtime_checkable
class HasTokenFigures(Protocol):
    """Owner of the figures of each token of the micro-batch in flight: the module."""

    token_figures: Mapping[str, Tensor]


@runtime_checkable
class Learner(Protocol):
    """What rollouts need of the module that learns from them."""

    policy_version: int
    tokenizer: PreTrainedTokenizerBase
    temperature: float

    @property
    def policy_model(self) -> PreTrainedModel:
        """The model whose weights are rolled out."""
        ...

    def annotate(self, rows: RolloutBatch, trajectories: Sequence[Trajectory]) -> RolloutBatch:
        """Add to fresh rows what the objective needs: advantages, reference log-probabilities."""
        ...


def owner_of(protocol: type[Owner], *candidates: object) -> Owner:
    """The first candidate that satisfies ``protocol``.

    Raises:
        TypeError: none does; the message names the protocol and the candidates.
    """
    for candidate in candidates:
        if isinstance(candidate, protocol):
            return candidate
    names = [type(candidate).__name__ for candidate in candidates]
    raise TypeError(f"no owner of {protocol.__name__} among {names}")
