"""What flows through a run: a task becomes turns, turns a trajectory, trajectories a batch of rows.

A worked example. Task "find the coin" is rolled out with two siblings. Sibling 0 plays two turns:

    turn 0   prompt_ids [1, 7, 8]                completion [20, 2]   observation "You see a door."
    turn 1   prompt_ids [1, 7, 8, 20, 2, 9, 9]   completion [21, 2]   observation None, the episode is done

Turn 1's prompt extends turn 0's prompt and completion, so both share one row of the batch, whose ``turn`` is
``[-1, -1, -1, 0, 0, -1, -1, 1, 1]``: the loss mask is ``turn >= 0`` and no token was ever re-tokenised.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

FinishReason = Literal["stop", "length"]
Author = Literal["policy", "expert", "teacher"]


class Message(TypedDict):
    """One chat message, as chat templates take it."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is asked.

    Attributes:
        id: unique in its split; the same task has the same id in every run.
        prompt: messages known before the episode starts (may be empty: the environment's ``reset`` may add to it).
        payload: the environment's own description of the task.
    """

    id: str
    prompt: tuple[Message, ...] = ()
    payload: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the policy generated in one request.

    Attributes:
        token_ids: generated tokens, the stop token included.
        logprobs: log-probability of each of them under the distribution it was sampled from, nats.
        finish_reason: "stop" at a stop token, "length" at the token or context limit.
        policy_version: version of the weights that sampled each token.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    policy_version: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logprobs) == len(self.policy_version):
            raise ValueError(
                f"a completion needs one logprob and one policy_version a token, got {len(self.token_ids)} tokens, "
                f"{len(self.logprobs)} logprobs and {len(self.policy_version)} versions"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One generation request and what the environment answered.

    Attributes:
        index: 0-based position among the trajectory's turns.
        prompt_ids: the *full* prompt that the engine saw, token by token.
        completion: the policy's tokens.
        text: the completion as the environment read it.
        observation: the environment's answer; None when there was none to give.
        reward: reward of this turn.
        seconds: wall-clock time of generation and environment step together.
        author: who played it. An expert's turn is context to the learner; a teacher's is trained on.
    """

    index: int
    prompt_ids: tuple[int, ...]
    completion: Completion
    text: str
    observation: str | None
    reward: float
    seconds: float
    author: Author = "policy"


class Ending(enum.Enum):
    """How a trajectory ended. All but DONE are truncations: they bootstrap, and are censored for depth statistics."""

    DONE = "done"
    TURN_LIMIT = "turn_limit"
    CONTEXT_LIMIT = "context_limit"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One episode of one task.

    Attributes:
        group: index of the task's group in its collection, with streaming in the run; siblings share it.
        sibling: 0-based position inside the group.
        reward: the outcome that advantages are made of; the sum of turn rewards unless a reward function replaced it.
        success: whether the environment counts the task as solved.
        turn_limit: the limit under which it was rolled out, turns.
        seed: seed of its sampling.
        started: collection at whose start it was begun: its own or, with streaming, an earlier one.
        metrics: further numbers that the environment reported, averaged over a collection for the log.
    """

    task: Task
    group: int
    sibling: int
    turns: tuple[Turn, ...]
    reward: float
    success: bool
    ending: Ending
    turn_limit: int
    seed: int
    started: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_finite(self) -> bool:
        """Whether its rewards and log-probabilities are numbers that can be trained on."""
        numbers = [self.reward, *(turn.reward for turn in self.turns)]
        numbers += [logprob for turn in self.turns for logprob in turn.completion.logprobs]
        return all(map(math.isfinite, numbers))

    @property
    def generated_tokens(self) -> int:
        """Tokens that the policy generated, over all turns."""
        return sum(len(turn.completion.token_ids) for turn in self.turns if turn.author == "policy")

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """Reward of each turn; they sum to ``reward``: what a reward function changed is on the last."""
        rewards = [turn.reward for turn in self.turns]
        if rewards and sum(rewards) != self.reward:
            rewards[-1] += self.reward - sum(rewards)
        return tuple(rewards)


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
        return TeacherScores(**{f.name: function(getattr(self, f.name)) for f in dataclasses.fields(self)})


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
        return Comparison(**{f.name: function(getattr(self, f.name)) for f in dataclasses.fields(self)})


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
        held = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        changes: dict[str, Any] = {
            name: function(value) if isinstance(value, Tensor) else value.map(function)
            for name, value in held.items()
            if value is not None
        }
        return dataclasses.replace(self, **changes)

    def replace(self, **changes: Any) -> RolloutBatch:
        """A copy with some fields exchanged."""
        return dataclasses.replace(self, **changes)

    @property
    def generated(self) -> Tensor:
        """The loss mask, bool [B, T]."""
        return self.turn >= 0


Summed = TypeVar("Summed")


def sum_by_turn(left: Summed, right: Summed) -> Summed:
    """Field by field the sum of two dataclasses of vectors by turn index, the shorter padded with zeros."""
    names = [f.name for f in dataclasses.fields(left)]  # type: ignore[arg-type]
    depth = max(len(getattr(side, name)) for side in (left, right) for name in names)
    return type(left)(**{name: sum_padded(getattr(left, name), getattr(right, name), depth) for name in names})


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
        return sum_by_turn(self, other)


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
        return sum_by_turn(self, other)


def sum_padded(left: Tensor, right: Tensor, length: int) -> Tensor:
    """Sum of two vectors, each padded with zeros to ``length``."""
    pad = torch.nn.functional.pad
    return pad(left, (0, length - len(left))) + pad(right, (0, length - len(right)))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """The parts of one micro-batch's loss, each a scalar already summed under the batch's weights.

    The update is ``factor * grad(policy) + grad(regularizer + value)``.

    Attributes:
        policy: policy-gradient part, or the distillation loss.
        regularizer: KL to the reference, entropy bonus; None where there is none.
        value: critic loss; None without a critic.
        clip_bias: scalar whose gradient is the clipping bias C; None where nothing can clip.
        clipped: tokens whose ratio was clipped, bool [B, T].
        policy_by_token: what each token adds to ``policy``; clip_bias_by_token: to ``clip_bias``; both [B, T], for
            those who scale trajectories apart from one another.
        weights: weights of the tokens, [B, T].
    """

    policy: Tensor
    regularizer: Tensor | None = None
    value: Tensor | None = None
    clip_bias: Tensor | None = None
    clipped: Tensor | None = None
    policy_by_token: Tensor | None = None
    clip_bias_by_token: Tensor | None = None
    weights: Tensor | None = None

    @property
    def total(self) -> Tensor:
        """The loss to minimise."""
        return sum((t for t in (self.regularizer, self.value) if t is not None), self.policy)
