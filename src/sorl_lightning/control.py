"""Knobs, and the protocols through which callbacks reach them.

A knob has one owner, which reads it and logs it; a callback only sets it. Its rest value is the baseline, so leaving a
callback out *is* the ablation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sorl_lightning.types import LossTerms, RolloutBatch, Trajectory

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


@runtime_checkable
class HasRolloutBudget(Protocol):
    """Owner of the rollout depth: the datamodule."""

    rollout_budget: RolloutBudget


@runtime_checkable
class HasKLSchedule(Protocol):
    """Owner of the loss blend: the module."""

    kl_schedule: KLSchedule


@runtime_checkable
class HasClipBias(Protocol):
    """Owner of the loss terms of the micro-batch in flight: the module."""

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
