"""Groups without signal, and others in their place (DAPO's dynamic sampling, arXiv:2503.14476)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from sorl_lightning import ranks
from sorl_lightning.rollout.collection import Collection
from sorl_lightning.rollout.metrics import constant_group_ids
from sorl_lightning.types import Trajectory


def resampled(collection: Collection, rounds: int, play: Callable[[int, int], Collection]) -> Collection:
    """``collection`` with groups without signal replaced, on all ranks together.

    Args:
        rounds: after so many, those that are left stay.
        play: rolls out other tasks, from the number of the round and the most of them that can be used.
    """
    for number in range(rounds):
        dead = constant_group_ids(collection.trajectories)
        most = max(ranks.gather(len(dead))) * ranks.count()
        if not most:
            break
        collection = replace_groups(collection, dead, play(number, most))
    return collection


def replace_groups(collection: Collection, dead: Sequence[int], fresh: Collection) -> Collection:
    """Put the groups of ``fresh`` that have signal in the place of groups ``dead``, as far as there are any.

    What was played and is not trained is in ``discarded``, its groups numbered apart from those that are.
    """
    lifeless = set(constant_group_ids(fresh.trajectories))
    alive = dict.fromkeys(t.group for t in fresh.trajectories if t.group not in lifeless)
    place = dict(zip(alive, dead, strict=False))
    replaced = set(place.values())
    kept = [t for t in collection.trajectories if t.group not in replaced]
    moved = [dataclasses.replace(t, group=place[t.group]) for t in fresh.trajectories if t.group in place]
    spare = 1 + max((t.group for t in (*collection.played, *fresh.trajectories)), default=0)
    left = _renumbered((t for t in collection.trajectories if t.group in replaced), spare)
    left += _renumbered((t for t in fresh.trajectories if t.group not in place), 2 * spare)
    return dataclasses.replace(
        collection,
        trajectories=tuple(sorted([*kept, *moved], key=lambda t: (t.group, t.sibling))),
        failures=collection.failures + fresh.failures,
        seconds=collection.seconds + fresh.seconds,
        discarded=(*collection.discarded, *left),
    )


def _renumbered(trajectories: Iterable[Trajectory], offset: int) -> list[Trajectory]:
    return [dataclasses.replace(t, group=t.group + offset) for t in trajectories]
