"""Which tasks are played when: a pure function of the seed and the number of the collection."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sorl_lightning.rollout.engine import derive_seed
from sorl_lightning.types import Task


def tasks_of_collection(tasks: Sequence[Task], index: int, size: int, seed: int) -> list[Task]:
    """The ``size`` tasks of collection ``index``, on all ranks.

    Every task is played once before one is played twice, in a new order each time round.
    """
    positions = range(index * size, (index + 1) * size)
    rounds = {position // len(tasks) for position in positions}
    orders = {r: permutation(len(tasks), derive_seed(seed, "order", r)) for r in rounds}
    return [tasks[orders[p // len(tasks)][p % len(tasks)]] for p in positions]


def tasks_of_round(tasks: Sequence[Task], index: int, number: int, seed: int) -> list[Task]:
    """Tasks that may replace those of collection ``index`` in round ``number`` of resampling, on all ranks."""
    return [tasks[p] for p in permutation(len(tasks), derive_seed(seed, "resample", index, number))]


def permutation(length: int, seed: int) -> list[int]:
    """Numbers below ``length`` in an order that depends on ``seed`` alone."""
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed)).tolist()
