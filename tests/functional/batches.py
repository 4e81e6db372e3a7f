"""Random batches of trajectories, and ways of laying the same tokens out in rows."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

import torch
from torch import Tensor

TurnKey = tuple[int, int]  # trajectory id, turn


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of tokens, float64. ``token`` numbers the generated ones, so that layouts can be compared."""

    turn: Tensor
    trajectory: Tensor
    token: Tensor
    new: Tensor
    old: Tensor
    advantages: Tensor

    def in_order(self, values: Tensor) -> Tensor:
        """The generated tokens' values, in an order that does not depend on the layout."""
        generated = self.turn >= 0
        return values[generated][self.token[generated].argsort()]

    def rows(self, rows: list[int]) -> Batch:
        """Some of the rows, as a micro-batch."""
        return Batch(**{f.name: getattr(self, f.name)[rows] for f in dataclasses.fields(self)})


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The generated tokens themselves: (new, old, advantage, number) of each token of each turn."""

    turns: dict[TurnKey, list[tuple[float, float, float, int]]]

    def laid_out(self, rows: list[list[TurnKey]], garbage: float = 0.0, padding: int = 0) -> Batch:
        """One row per list of turns, with one token of context before each turn and ``garbage`` in all context."""
        width = max(sum(1 + len(self.turns[key]) for key in row) for row in rows) + padding
        ints = {name: torch.full((len(rows), width), -1) for name in ("turn", "trajectory", "token")}
        floats = {name: torch.full((len(rows), width), garbage).double() for name in ("new", "old", "advantages")}
        for b, row in enumerate(rows):
            t = 0
            for trajectory, turn in row:
                t += 1
                for new, old, advantage, number in self.turns[trajectory, turn]:
                    ints["turn"][b, t], ints["trajectory"][b, t], ints["token"][b, t] = turn, trajectory, number
                    floats["new"][b, t], floats["old"][b, t], floats["advantages"][b, t] = new, old, advantage
                    t += 1
        return Batch(**ints, **floats)

    def one_row_each(self, **options: float) -> Batch:
        """One trajectory per row, in the order in which ids first occur."""
        ids = dict.fromkeys(trajectory for trajectory, _ in self.turns)
        return self.laid_out([[key for key in self.turns if key[0] == i] for i in ids], **options)

    def one_row_per_turn(self, **options: float) -> Batch:
        """Every turn in a row of its own, so that trajectories are split over rows."""
        return self.laid_out([[key] for key in self.turns], **options)

    def one_row(self, **options: float) -> Batch:
        """All trajectories packed into a single row."""
        return self.laid_out([list(self.turns)], **options)


def tokens_of(seed: int, longest_turn: int = 5, most_turns: int = 4) -> Tokens:
    """Random tokens from a seed: 1 to 6 trajectories with arbitrary ids, of 1 to 4 turns of 1 to 5 tokens."""
    rng = random.Random(seed)
    turns: dict[TurnKey, list[tuple[float, float, float, int]]] = {}
    number = 0
    for trajectory in rng.sample(range(-50, 50), rng.randint(1, 6)):
        for turn in range(rng.randint(1, most_turns)):
            length = rng.randint(1, longest_turn)
            olds = [rng.uniform(-3, 0) for _ in range(length)]
            turns[trajectory, turn] = [
                (old + rng.gauss(0, 0.5), old, rng.choice([-1.5, -0.5, 0.0, 0.7, 2.0]), number + i)
                for i, old in enumerate(olds)
            ]
            number += length
    return Tokens(turns=turns)
