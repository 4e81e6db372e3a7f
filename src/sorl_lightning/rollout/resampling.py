"""Groups without signal, and others in their place (DAPO's dynamic sampling, arXiv:2503.14476)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from sorl_lightning.rollout.collector import Collection
from sorl_lightning.rollout.metrics import constant_group_ids
from sorl_lightning.types import Trajectory


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
