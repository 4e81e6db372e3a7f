"""Which groups may start, and which are trained, where collections are generated while others train.

Collection k trains on weights k: those at its start, which its optimiser steps turn into weights k + 1. A token that
weights j sampled and that collection k trains on has staleness k - j; a group has that of its oldest token. A group
that starts under weights j is due in collection j + max_staleness at the latest. Each collection trains ``quota``
groups. These are deadlines of equal jobs on one machine: they can all be met exactly if, for every d, at most
quota * (d - collection + 1) groups are due by collection d, where ``collection`` is the next to be trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def on_time(dues: Iterable[int], quota: int, collection: int) -> bool:
    """Whether groups with these deadlines can all be trained by them, ``quota`` in each collection from this one on.

    >>> on_time([3, 3, 4], quota=2, collection=3), on_time([3, 3, 3], quota=2, collection=3)
    (True, False)
    """
    ordered = sorted(dues)
    return all(number < quota * (due - collection + 1) for number, due in enumerate(ordered))


def admissible(dues: Sequence[int], quota: int, collection: int, max_staleness: int) -> int:
    """Groups that may start under the weights of ``collection``, the next to be trained, beside those outstanding.

    As many as can be trained in time whatever finishes when.

    Args:
        dues: deadlines of the groups that have started and are not trained, finished or not.
        quota: groups that a collection trains.

    >>> admissible([3, 3], quota=2, collection=3, max_staleness=1)
    2
    """
    due = collection + max_staleness
    last = max((due, *dues))
    return max(0, min(quota * (d - collection + 1) - sum(e <= d for e in dues) for d in range(due, last + 1)))


def chosen(dues: Sequence[int], finished: Sequence[bool], quota: int, collection: int) -> list[int] | None:
    """Indices of the groups that ``collection`` trains: the first finished ones that leave the rest on time.

    Args:
        dues: deadlines of all outstanding groups, in the order in which they started.
        finished: whether each is there to be trained.
        quota: how many are trained.

    Returns:
        ``quota`` indices, ascending; None where more groups must finish first.

    Raises:
        ValueError: somebody comes too late whatever is chosen.

    >>> chosen([4, 4, 4], [False, True, True], quota=2, collection=3)
    [1, 2]
    >>> chosen([3, 4, 4], [False, True, True], quota=2, collection=3) is None
    True
    """
    if not on_time(dues, quota, collection):
        raise ValueError(f"groups due in {sorted(dues)} cannot all be trained, {quota} a collection from {collection}")
    # Of those due after d, so many may be taken that enough of those due by d are: a greedy choice fills such limits.
    limits = {d: quota - max(0, sum(e <= d for e in dues) - quota * (d - collection)) for d in set(dues)}
    taken: list[int] = []
    later = dict.fromkeys(limits, 0)  # taken so far, of those due after d
    for index, due in enumerate(dues):
        passed = [d for d in limits if d < due]
        if finished[index] and len(taken) < quota and all(later[d] < limits[d] for d in passed):
            taken.append(index)
            for d in passed:
                later[d] += 1
    return taken if len(taken) == quota else None


def may_push(dues: Iterable[int], collection: int) -> bool:
    """Whether the weights of ``collection`` may come: no group in the making was to be trained before it.

    >>> may_push([3, 4], collection=3), may_push([3, 4], collection=4)
    (True, False)
    """
    return all(due >= collection for due in dues)
