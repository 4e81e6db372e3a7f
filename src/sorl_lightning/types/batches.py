"""What is trained on: rows of tokens, and what a teacher says of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Held = TypeVar("Held")


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherScores:
    """What a teacher said at each generated token, taken when the rows were collected; zeros elsewhere.

    Attributes:
        ids: its K most likely tokens; K may be 0.
        logprobs: their log-probabilities, nats; -inf marks an entry that is only padding.
        sampled_logprobs: log-probability of the token that was sampled, nats.
    """

    ids: Int[Tensor, "B T K"]
    logprobs: Float[Tensor, "B T K"]
    sampled_logprobs: Float[Tensor, "B T"]

    def map(self, function: Callable[[Tensor], Tensor]) -> TeacherScores:
        """A copy with ``function`` applied to every tensor."""
        return _mapped(self, function)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Student and teacher at each generated token, under the weights in training; 0 elsewhere.

    Attributes:
        divergence: their divergence, nats; keeps the student's graph.
        teacher_entropy: entropy of the teacher, nats; of its top K and the rest as one more outcome where no more is
            known, which is a lower bound.
    """

    divergence: Float[Tensor, "B T"]
    teacher_entropy: Float[Tensor, "B T"]

    def map(self, function: Callable[[Tensor], Tensor]) -> Comparison:
        """A copy with ``function`` applied to every tensor."""
        return _mapped(self, function)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """Rows of tokens, ready to train on. Every field is aligned to its own token; nothing is shifted.

    Attributes:
        input_ids: tokens, padded on the right.
        position_ids: position of each token in its own context; padding counts on.
        turn: turn that generated the token, -1 for context and padding. ``turn >= 0`` is the loss mask.
        trajectory: trajectory of each token; its value is free where ``turn`` is -1.
        behaviour_logprobs: log-probability under the weights and temperature that sampled the token, nats; 0 elsewhere.
        policy_version: version of the weights that sampled the token, -1 elsewhere.
        rewards: turn and outcome rewards, on the last generated token of their turn.
        advantages: advantage of each generated token.
        trajectory_weights: weight of each token when trajectories count equally; sums to 1 over the optimiser batch.
        turn_weights: the same when turns count equally.
        old_logprobs: log-probability under the trainer's own weights at the start of the collection, nats; None where
            ``behaviour_logprobs`` stand for it.
        reference_logprobs: log-probability under the reference model, nats.
        values: the critic's value before the token; returns: its target.
        teacher: what the teacher said at collection time, for objectives that read its top K or the sampled token.
        by_teacher: whether the teacher played the token's turn; None where it played none.
        factors: what each token's weight is multiplied by before weights are brought back to their sum.
        comparison: student and teacher in the training step that is under way; None outside of one.
    """

    input_ids: Int[Tensor, "B T"]
    position_ids: Int[Tensor, "B T"]
    turn: Int[Tensor, "B T"]
    trajectory: Int[Tensor, "B T"]
    behaviour_logprobs: Float[Tensor, "B T"]
    policy_version: Int[Tensor, "B T"]
    rewards: Float[Tensor, "B T"]
    advantages: Float[Tensor, "B T"]
    trajectory_weights: Float[Tensor, "B T"]
    turn_weights: Float[Tensor, "B T"]
    old_logprobs: Float[Tensor, "B T"] | None = None
    reference_logprobs: Float[Tensor, "B T"] | None = None
    values: Float[Tensor, "B T"] | None = None
    returns: Float[Tensor, "B T"] | None = None
    teacher: TeacherScores | None = None
    by_teacher: Bool[Tensor, "B T"] | None = None
    factors: Float[Tensor, "B T"] | None = None
    comparison: Comparison | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> RolloutBatch:
        """A copy on ``device``; Lightning moves batches through this."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def map(self, function: Callable[[Tensor], Tensor]) -> RolloutBatch:
        """A copy with ``function`` applied to every tensor that is there."""
        return _mapped(self, function)

    def replace(self, **changes: Any) -> RolloutBatch:
        """A copy with some fields exchanged."""
        return dataclasses.replace(self, **changes)

    @property
    def generated(self) -> Tensor:
        """The loss mask, bool [B, T]."""
        return self.turn >= 0


def _mapped(held: Held, function: Callable[[Tensor], Tensor]) -> Held:
    """A copy of a dataclass with ``function`` applied to every tensor in it, and in those that it holds."""
    values = {f.name: getattr(held, f.name) for f in dataclasses.fields(held)}  # type: ignore[arg-type]
    changes: dict[str, Any] = {
        name: function(value) if isinstance(value, Tensor) else value.map(function)
        for name, value in values.items()
        if value is not None
    }
    return dataclasses.replace(held, **changes)  # type: ignore[type-var]
