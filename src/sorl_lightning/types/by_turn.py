"""What is known turn by turn: counts and sums that add over micro-batches and ranks, and what they are made of."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

Summed = TypeVar("Summed")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStatistics:
    """Counts by turn index over a batch; adds with ``+``, so micro-batches and ranks merge by a sum.

    Attributes:
        trajectories: trajectories with a generated token at the turn.
        tokens: generated tokens at the turn.
        divergence_sum: sum over those tokens of the divergence to the teacher, nats.
        success_last_turns: successful trajectories by the index of their last turn.
        all_last_turns: all trajectories by the index of their last turn.
    """

    trajectories: Float[Tensor, "H"]
    tokens: Float[Tensor, "H"]
    divergence_sum: Float[Tensor, "H"]
    success_last_turns: Float[Tensor, "H"]
    all_last_turns: Float[Tensor, "H"]

    def __add__(self, other: TurnStatistics) -> TurnStatistics:
        return _sum_by_turn(self, other)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnProfile:
    """Sums over the generated tokens of each turn index, for reports; adds with ``+``.

    Attributes:
        tokens: generated tokens at the turn; failed_tokens: those of trajectories that failed.
        divergence: divergence to the teacher, nats; failed_divergence: of trajectories that failed.
        student_entropy: entropy of the policy, nats; teacher_entropy: of the teacher.
        loss: weight times divergence: the turn's part of the distillation loss.
    """

    tokens: Float[Tensor, "H"]
    failed_tokens: Float[Tensor, "H"]
    divergence: Float[Tensor, "H"]
    failed_divergence: Float[Tensor, "H"]
    student_entropy: Float[Tensor, "H"]
    teacher_entropy: Float[Tensor, "H"]
    loss: Float[Tensor, "H"]

    def __add__(self, other: TurnProfile) -> TurnProfile:
        return _sum_by_turn(self, other)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSignals:
    """What is known of each generated token when its rows are collected; 0 elsewhere.

    Attributes:
        turn: turn that generated it, -1 for context and padding.
        trajectory: its trajectory.
        divergence: of student and teacher, nats.
        student_entropy: of the student, nats.
        teacher_confidence: probability of the teacher's most likely token.
        overlap: share of the student's 16 most likely tokens that are among the teacher's 16.
    """

    turn: Int[Tensor, "B T"]
    trajectory: Int[Tensor, "B T"]
    divergence: Float[Tensor, "B T"]
    student_entropy: Float[Tensor, "B T"]
    teacher_confidence: Float[Tensor, "B T"]
    overlap: Float[Tensor, "B T"]


def _sum_by_turn(left: Summed, right: Summed) -> Summed:
    """Field by field the sum of two dataclasses of vectors by turn index, the shorter padded with zeros."""
    names = [f.name for f in dataclasses.fields(left)]  # type: ignore[arg-type]
    depth = max(len(getattr(side, name)) for side in (left, right) for name in names)
    return type(left)(**{name: _sum_padded(getattr(left, name), getattr(right, name), depth) for name in names})


def _sum_padded(left: Tensor, right: Tensor, length: int) -> Tensor:
    """Sum of two vectors, each padded with zeros to ``length``."""
    pad = torch.nn.functional.pad
    return pad(left, (0, length - len(left))) + pad(right, (0, length - len(right)))
