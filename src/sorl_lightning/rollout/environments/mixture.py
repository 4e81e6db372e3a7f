"""Several environments in one run, each with a weight and with figures of its own."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.environment import Environment, HasClose, Step, open_episode
from sorl_lightning.types import Message, Task

MOST_TASKS = 1_000_000  # of a round over all training tasks; beyond it the weights are a mistake


@dataclass(frozen=True, kw_only=True)
class Member:
    """One environment of a mixture.

    Args:
        name: prefix of its tasks and figures; letters, digits, "_" and "-".
        environment: the world itself.
        weight: share of training tasks, relative to the other members'.
    """

    name: str
    environment: Environment
    weight: float = 1.0


class Mixture(Environment):
    """Plays tasks of several environments.

    Training tasks come in proportion to the weights: in a round over all of them each task of the member with the
    most tasks for its weight is played once, and tasks of the others come again as often as their share asks.
    Collections draw from the round at random, so the proportion holds on average. Held-out splits have every task
    of every member once, the members taking turns.

    Every number that a member reports is logged as ``environment/MEMBER/NAME``, with "success", "return" and "turns".

    Args:
        members: with names that differ.
    """

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        self._by_name = {member.name: member for member in members}
        if len(self._by_name) != len(members) or not members:
            raise ConfigurationError(f"members need names that differ, got {[member.name for member in members]}")
        for member in members:
            if not member.name.replace("-", "").replace("_", "").isalnum():
                raise ConfigurationError(f"a member's name has letters, digits, _ and - only, got {member.name!r}")
            if not 0 < member.weight < float("inf"):
                raise ConfigurationError(f"member {member.name!r} needs a weight above 0, got {member.weight}")

    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks of all members, named "MEMBER/id"; one that comes again is named "MEMBER/id#2" and so on.

        Raises:
            ConfigurationError: a member has no tasks in the split, or the weights need too many repetitions.
        """
        found = {member.name: member.environment.tasks(split) for member in self.members}
        for name, tasks in found.items():
            if not tasks:
                raise ConfigurationError(f"member {name!r} has no tasks in its {split!r} split")
        if split != "train":
            rounds = zip_longest(*([_named(name, task, 1) for task in tasks] for name, tasks in found.items()))
            return [task for together in rounds for task in together if task is not None]
        scale = max(len(found[member.name]) / member.weight for member in self.members)
        counts = {member.name: round(scale * member.weight) for member in self.members}
        if sum(counts.values()) > MOST_TASKS:
            raise ConfigurationError(
                f"weights {[member.weight for member in self.members]} over {[len(t) for t in found.values()]} tasks "
                f"need a round of {sum(counts.values())} tasks, more than {MOST_TASKS}; bring the weights closer"
            )
        return [
            _named(name, tasks[number % len(tasks)], 1 + number // len(tasks))
            for name, tasks in found.items()
            for number in range(counts[name])
        ]

    async def reset(self, task: Task) -> Sequence[Message]:
        """Start an episode of the task's member."""
        self._name, inner = task.payload
        self._episode = open_episode(self._by_name[self._name].environment)
        self._return, self._turns = 0.0, 0
        # What the episode offers beyond the three methods, the mixture's episode offers too, and nothing else.
        for extra in ("expert_action", "admissible_actions"):
            if hasattr(self._episode, extra):
                setattr(self, extra, getattr(self._episode, extra))
        return await _resolved(self._episode.reset(inner))

    async def step(self, text: str) -> Step:
        """Act in the task's member; its figures get its name."""
        step = Step(*await _resolved(self._episode.step(text)))
        self._return += step.reward
        self._turns += 1
        success = bool(step.info.get("success", False))
        figures = {**step.info, "success": float(success), "return": self._return, "turns": float(self._turns)}
        named = {f"{self._name}/{figure}": value for figure, value in figures.items()}
        return step._replace(info={"success": success, **named})

    async def close(self) -> None:
        """Close the members."""
        for member in self.members:
            if isinstance(member.environment, HasClose):
                await _resolved(member.environment.close())


def _named(name: str, task: Task, time: int) -> Task:
    suffix = "" if time == 1 else f"#{time}"
    return Task(id=f"{name}/{task.id}{suffix}", prompt=task.prompt, payload=(name, task))


async def _resolved(value: Any | Awaitable[Any]) -> Any:
    return await value if inspect.isawaitable(value) else value
