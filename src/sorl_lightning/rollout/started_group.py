"""A group that has started and is not trained, and how a checkpoint keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.collector import Group
from sorl_lightning.rollout.guarded_episode import EnvironmentFailure
from sorl_lightning.rollout.trajectory_records import record_of, trajectory_of
from sorl_lightning.types import Task


@dataclass(kw_only=True)
class StartedGroup:
    """One such group.

    Attributes:
        collection: at whose start it began; the bound of its staleness runs from there.
        max_turns: the limit that was in force then.
        outcome: its trajectories, or its failure; None while it is played.
    """

    task: Task
    collection: int
    max_turns: int
    outcome: Group | None = None

    @property
    def finished(self) -> bool:
        """Whether it can be trained, or has failed."""
        return self.outcome is not None

    def record(self, position: int) -> dict[str, Any]:
        """In plain containers, with the position of its task among all that are drawn."""
        record = {
            "position": position,
            "task": self.task.id,
            "collection": self.collection,
            "max_turns": self.max_turns,
        }
        if isinstance(self.outcome, EnvironmentFailure):
            return {**record, "failure": str(self.outcome)}
        return record if self.outcome is None else {**record, "trajectories": [record_of(t) for t in self.outcome]}

    @classmethod
    def of(cls, record: Mapping[str, Any], task: Task) -> StartedGroup:
        """The group that ``record`` was made of, whose task is ``task``.

        Raises:
            ConfigurationError: its task was another.
        """
        if record["task"] != task.id:
            raise ConfigurationError(
                f"ckpt_path holds a group of task {record['task']!r} where data.environment and data.seed now give "
                f"task {task.id!r}: resume with those of before"
            )
        outcome: Group | None = None
        if "failure" in record:
            outcome = EnvironmentFailure(record["failure"])
        elif "trajectories" in record:
            outcome = tuple(trajectory_of(trajectory, task) for trajectory in record["trajectories"])
        return cls(task=task, collection=record["collection"], max_turns=record["max_turns"], outcome=outcome)
