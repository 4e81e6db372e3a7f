"""From a collection to micro-batches, in the sizes that Lightning must know beforehand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sorl_lightning import ranks
from sorl_lightning.functional.lines import SortedRows
from sorl_lightning.functional.turns import turn_statistics
from sorl_lightning.functional.weights import (
    each_turn_weights,
    fixed_weights,
    reweighted,
    token_weights,
    trajectory_weights,
    turn_weights,
)
from sorl_lightning.rollout.collection import Collection
from sorl_lightning.rollout.engine import derive_seed
from sorl_lightning.rollout.micro_batches import balance
from sorl_lightning.rollout.packing import lengths, select
from sorl_lightning.rollout.task_order import permutation
from sorl_lightning.types import RolloutBatch, TurnStatistics

Aggregation = Literal["trajectory", "token", "turn", "fixed"]
# Each from turns, trajectories, counts of the whole batch, and the most tokens that a trajectory can generate.
AGGREGATIONS: dict[Aggregation, Callable[[Tensor, Tensor, TurnStatistics, int], Tensor]] = {
    "trajectory": lambda turn, trajectory, counts, _: trajectory_weights(turn, trajectory, counts),
    "token": lambda turn, trajectory, counts, _: token_weights(turn, counts),
    "turn": lambda turn, trajectory, counts, _: each_turn_weights(turn, trajectory, counts),
    "fixed": lambda turn, trajectory, counts, length: fixed_weights(turn, length, trajectory, counts),
}


class Sealed:
    """A batch on its way through Lightning, which would cast its log-probabilities to the trainer's precision."""

    def __init__(self, content: RolloutBatch | Collection) -> None:
        self.content = content


@dataclass(frozen=True, kw_only=True)
class UpdatePlan:
    """How the rows of a collection become optimiser steps; the arguments are those of RolloutDataModule.

    Every rank cuts its own rows, into as many micro-batches as the others.

    Attributes:
        padded: whether the policy computes padding, which then counts for ``token_budget``.
        shortest: fewest tokens that several rows open with and that the policy computes once; None: it never does.
    """

    mini_batches: int
    passes: int
    micro_batches: int
    token_budget: int | None
    aggregation: Aggregation
    max_turns: int
    max_tokens: int
    seed: int
    padded: bool = False
    shortest: int | None = None

    def __len__(self) -> int:
        """Micro-batches of a collection."""
        return self.mini_batches * self.passes * self.micro_batches

    def micro_batches_of(self, rows: RolloutBatch, index: int) -> Iterator[RolloutBatch]:
        """Micro-batches of collection ``index``: each pass trains every row once, in an order of its own.

        Raises:
            ConfigurationError: an update does not fit the token budget, here or on another rank; raised before the
                first micro-batch.
        """
        row_lengths, updates = lengths(rows), list(self._updates(rows, index))
        cuts = ranks.together(lambda: [self._split(rows.input_ids[u], row_lengths[u]) for u in updates])
        for update, counts, parts in zip(updates, self._counts(rows, updates), cuts, strict=True):
            weighed = self._weigh(select(rows, update), counts)
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

    def _split(self, input_ids: Tensor, sizes: Tensor) -> list[Tensor]:
        openings = None
        if self.shortest is not None and self.micro_batches > 1 and len(sizes):
            openings = SortedRows.of(input_ids, sizes.clamp(min=1), self.shortest)
        return balance(sizes, self.micro_batches, self.token_budget, self.padded, openings)

    def _counts(self, rows: RolloutBatch, updates: Sequence[Tensor]) -> list[TurnStatistics]:
        """Counts of each update over all ranks: what makes a weight of a rank's share one of the whole."""
        shares = [turn_statistics(rows.turn[u], rows.trajectory[u], depth=self.max_turns) for u in updates]
        names = [field.name for field in dataclasses.fields(TurnStatistics)]
        summed = ranks.total(torch.stack([torch.stack([getattr(share, name) for name in names]) for share in shares]))
        return [TurnStatistics(**dict(zip(names, counts, strict=True))) for counts in summed]

    def _weigh(self, update: RolloutBatch, counts: TurnStatistics) -> RolloutBatch:
        """Weights that sum to 1 over the optimiser batch: all its micro-batches, on all ranks (not so "fixed")."""
        length = self.max_turns * self.max_tokens
        weights = {
            "trajectory_weights": AGGREGATIONS[self.aggregation](update.turn, update.trajectory, counts, length),
            "turn_weights": turn_weights(update.turn, update.trajectory, counts=counts),
        }
        if update.factors is not None:
            weights = {name: reweighted(values, update.factors, ranks.total) for name, values in weights.items()}
        return update.replace(**weights)


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
