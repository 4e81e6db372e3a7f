"""What is played: a task becomes turns, turns a trajectory."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

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
