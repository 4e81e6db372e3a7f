"""Trajectories as plain containers, for checkpoints that can be read without trusting them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sorl_lightning.types import Completion, Ending, Task, Trajectory, Turn


def record_of(trajectory: Trajectory) -> dict[str, Any]:
    """All of a trajectory but its task, of which the id is kept. A turn's prompt is kept from where it is new."""
    return {
        **_fields(trajectory),
        "task": trajectory.task.id,
        "turns": list(_turn_records(trajectory.turns)),
        "ending": trajectory.ending.value,
        "metrics": dict(trajectory.metrics),
    }


def trajectory_of(record: Mapping[str, Any], task: Task) -> Trajectory:
    """The trajectory that ``record_of`` wrote down, whose task is ``task``."""
    turns: list[Turn] = []
    known: tuple[int, ...] = ()
    for fields in record["turns"]:
        prompt_ids = known[: fields["known"]] + fields["prompt_ids"]
        completion = Completion(**fields["completion"])
        rest = {name: value for name, value in fields.items() if name not in ("known", "prompt_ids", "completion")}
        turns.append(Turn(prompt_ids=prompt_ids, completion=completion, **rest))
        known = prompt_ids + completion.token_ids
    return Trajectory(**{**record, "task": task, "turns": tuple(turns), "ending": Ending(record["ending"])})


def _turn_records(turns: Sequence[Turn]) -> Iterator[dict[str, Any]]:
    known: tuple[int, ...] = ()
    for turn in turns:
        kept = len(known) if turn.prompt_ids[: len(known)] == known else 0
        yield {
            **_fields(turn),
            "known": kept,
            "prompt_ids": turn.prompt_ids[kept:],
            "completion": _fields(turn.completion),
        }
        known = turn.prompt_ids + turn.completion.token_ids


def _fields(item: Any) -> dict[str, Any]:
    return {f.name: getattr(item, f.name) for f in dataclasses.fields(item)}
