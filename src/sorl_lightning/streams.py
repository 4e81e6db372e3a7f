"""From a collection to micro-batches, in the sizes that Lightning must know beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sorl_lightning.functional.weights import (
    each_turn_weights,
    fixed_weights,
    token_weights,
    trajectory_weights,
    turn_weights,
)
from sorl_lightning.rollout.collector import Collection
from sorl_lightning.rollout.engine import derive_seed
from sorl_lightning.rollout.packing import balance, lengths, select
from sorl_lightning.types import RolloutBatch

Aggregation = Literal["trajectory", "token", "turn", "fixed"]
# Each from turns, trajectories and the most tokens that a trajectory can generate.
AGGREGATIONS: dict[Aggregation, Callable[[Tensor, Tensor, int], Tensor]] = {
    "trajectory": lambda turn, trajectory, _: trajectory_weights(turn, trajectory),
    "token": lambda turn, trajectory, _: token_weights(turn),
    "turn": lambda turn, trajectory, _: each_turn_weights(turn, trajectory),
    "fixed": lambda turn, trajectory, length: fixed_weights(turn, length, trajectory),
}


class Sealed:
    """A batch on its way through Lightning, which would cast its log-probabilities to the trainer's precision."""

    def __init__(self, content: RolloutBatch | Collection) -> None:
        self.content = content


@dataclass(frozen=True, kw_only=True)
class UpdatePlan:
    """How the rows of a collection become optimiser steps; the arguments are those of RolloutDataModule.

    ``length``, max_turns x max_tokens, is what the aggregation "fixed" divides by.
    """

    mini_batches: int
    passes: int
    micro_batches: int
    token_budget: int | None
    aggregation: Aggregation
    length: int
    seed: int

    def __len__(self) -> int:
        """Micro-batches of a collection."""
        return self.mini_batches * self.passes * self.micro_batches

    def micro_batches_of(self, rows: RolloutBatch, index: int) -> Iterator[RolloutBatch]:
        """Micro-batches of collection ``index``: each pass trains every row once, in an order of its own.

        Raises:
            ConfigurationError: an update does not fit the token budget; raised before the first micro-batch.
        """
        row_lengths = lengths(rows)
        updates = [(update, self._split(row_lengths[update])) for update in self._updates(rows, index)]
        for update, parts in updates:
            weighed = self._weigh(select(rows, update))
            for part in parts:
                yield select(weighed, part)

    def _updates(self, rows: RolloutBatch, index: int) -> Iterator[Tensor]:
        """Row numbers of each optimiser step: an equal share of the trajectories, all rows of each."""
        trajectory = rows.trajectory[:, 0]
        for number in range(self.passes):
            seed = derive_seed(self.seed, "mini_batches", index, number)
            order = torch.tensor(permutation(int(trajectory.max()) + 1, seed))
            for chosen in order.tensor_split(self.mini_batches):
                yield torch.isin(trajectory, chosen).nonzero()[:, 0]

    def _split(self, row_lengths: Tensor) -> list[Tensor]:
        return balance(row_lengths, self.micro_batches, self.token_budget)

    def _weigh(self, update: RolloutBatch) -> RolloutBatch:
        """Weights that sum to 1 over the optimiser batch, all its micro-batches together (not so "fixed")."""
        return update.replace(
            trajectory_weights=AGGREGATIONS[self.aggregation](update.turn, update.trajectory, self.length),
            turn_weights=turn_weights(update.turn, update.trajectory),
        )


class RolloutStream:
    """One collection as a stream of micro-batches.

    Sized, or Lightning would fetch a batch ahead and train on data one version old; lazy, since Lightning asks for the
    iterator before training has started.

    Args:
        collect: rolls out the next collection; its index and its rows.
        plan: how rows become micro-batches.
    """

    def __init__(self, collect: Callable[[], tuple[int, RolloutBatch]], plan: UpdatePlan) -> None:
        self.collect = collect
        self.plan = plan

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[Sealed]:
        index, rows = self.collect()
        for batch in self.plan.micro_batches_of(rows, index):
            yield Sealed(batch)


class EvaluationStream:
    """A held-out collection, as one batch."""

    def __init__(self, evaluate: Callable[[], Collection]) -> None:
        self.evaluate = evaluate

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Sealed]:
        yield Sealed(self.evaluate())


def permutation(length: int, seed: int) -> list[int]:
    """Numbers below ``length`` in an order that depends on ``seed`` alone."""
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed)).tolist()
