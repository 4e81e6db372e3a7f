"""What a world has to offer so that an agent can be trained in it."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.interfaces import Interface
from sorl_lightning.types import Message, Task


class Step(NamedTuple):
    """What an environment answers to one action; a plain tuple of the same five is as good.

    Attributes:
        observation: what the policy reads next, as text or, where a turn is answered by several messages (one for each
            tool that it called), as messages; "" once the episode is over.
        reward: reward of this action.
        terminated: the task is over: solved or lost.
        truncated: the environment's own limit cut the episode short.
        info: numbers about the step. "success" (bool) says whether the task is solved; every other number is averaged
            over trajectories and logged, as it stood at the last step.
    """

    observation: str | Sequence[Message]
    reward: float
    terminated: bool
    truncated: bool = False
    info: Mapping[str, Any] = {}

    @property
    def over(self) -> bool:
        """Whether the episode has ended, one way or the other."""
        return self.terminated or self.truncated


def observation_text(observation: str | Sequence[Message]) -> str:
    """What an observation says, its messages a line each."""
    return observation if isinstance(observation, str) else "\n".join(message["content"] for message in observation)


class Environment(Interface):
    """A world: its tasks, and one episode at a time.

    The object that a user configures is a prototype. Each episode is played on a fresh shallow copy of it
    (``open_episode``), used once and thrown away: what ``__init__`` set is shared by all episodes, what ``reset`` sets
    belongs to one. ``reset``, ``step`` and ``close`` may be plain methods (run in place: keep them fast) or coroutines.
    """

    @abstractmethod
    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks of ``split``, one of "train", "validation", "test"; in the same order in every run."""
        ...

    @abstractmethod
    def reset(self, task: Task) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """Start the episode; the messages that open it, which follow ``task.prompt``."""
        ...

    @abstractmethod
    def step(self, text: str) -> Step | Awaitable[Step]:
        """Act on the policy's text. A malformed action is answered in words and never raises."""
        ...


@runtime_checkable
class HasExpert(Protocol):
    """An environment that knows a good action in its present state (a gold path, a planner)."""

    def expert_action(self) -> str:
        """The expert's next action, as the policy would write it.

        Raises:
            LookupError: the expert has no action for this state.
        """
        ...


@runtime_checkable
class HasAdmissibleActions(Protocol):
    """An environment that can list the actions which make sense now."""

    def admissible_actions(self) -> Sequence[str]:
        """Actions that the environment would understand now, sorted."""
        ...


@runtime_checkable
class HasClose(Protocol):
    """An environment that holds something which must be given back (a process, a connection)."""

    def close(self) -> Awaitable[None] | None:
        """Release it. Called on the prototype once, at the end of the run or on an exception."""
        ...


def expert_of(environment: Environment) -> HasExpert:
    """``environment`` as one that knows a good action.

    Raises:
        ConfigurationError: it knows none.
    """
    if not isinstance(environment, HasExpert):
        name = type(environment).__name__
        raise ConfigurationError(f"an expert needs an environment with expert_action, and {name} has none")
    return environment


def open_episode(environment: Environment) -> Environment:
    """A fresh copy of ``environment`` for one episode; everything heavy stays shared."""
    return copy.copy(environment)
