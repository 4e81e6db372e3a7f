"""Turns that are decoded together, and that come and go token by token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sorl_lightning.rollout.engine import GenerationRequest, TrajectoryKey
from sorl_lightning.rollout.engines.cached_model import CachedModel, in_front
from sorl_lightning.rollout.engines.open_turn import OpenTurn, draw_tokens


class RunningBatch:
    """The turns in flight, in the first rows of the cache.

    Behind them sit trajectories between two turns. Rows are swapped when a turn begins or ends, so that a forward pass
    over the turns in flight reads the cache in place.

    Args:
        model: computes, and keeps keys and values.

    Attributes:
        turns: in flight.
    """

    def __init__(self, model: CachedModel) -> None:
        self.model = model
        self.turns: dict[TrajectoryKey, OpenTurn] = {}

    def admit(self, requests: Sequence[GenerationRequest], expected: int) -> list[OpenTurn]:
        """Begin a turn for each request, and draw its first token; returns the turns that end with it.

        Args:
            requests: of trajectories that are not in flight.
            expected: trajectories that will need a row at once.

        Raises:
            RolloutError: the model computed NaN.
        """
        first, seats = len(self.turns), self.model.seats
        keys = sorted(request.trajectory for request in requests)
        idle = [*seats[first:], *(key for key in keys if key not in self.model.cached_ids)]
        self.model.arrange([*seats[:first], *in_front(idle, keys)], rows=expected)
        begun = {request.trajectory: self.model.start(request) for request in requests}
        self.turns.update(begun)
        rows = {row: begun[self.model.seats[row]] for row in range(first, len(self.turns))}
        draw_tokens(list(rows.values()), self.model.read_prompts(rows))
        return self._ended()

    def step(self) -> list[OpenTurn]:
        """Draw the next token of every turn; returns the turns that end with it.

        Raises:
            RolloutError: the model computed NaN.
        """
        rows = {row: self.turns[key] for row, key in enumerate(self.model.seats[: len(self.turns)])}
        draw_tokens(list(rows.values()), self.model.read_last_tokens(rows))
        return self._ended()

    def give_up(self, trajectories: Iterable[TrajectoryKey]) -> None:
        """End turns that nobody waits for; what is cached of them stays."""
        self._leave([self.turns[key] for key in trajectories])

    def forget(self, trajectories: Iterable[TrajectoryKey]) -> None:
        """Give the rows of trajectories that are not in flight to others."""
        seats = self.model.seats
        gone = set(trajectories).intersection(seats)
        if gone:
            stay = [key for key in seats if key not in gone]
            self.model.arrange(in_front(seats, stay)[: len(stay)])

    def clear(self) -> None:
        """Give up all turns, and forget every trajectory."""
        self.turns.clear()
        self.model.clear()

    def _ended(self) -> list[OpenTurn]:
        ended = [turn for turn in self.turns.values() if turn.finish_reason is not None]
        self._leave(ended)
        return ended

    def _leave(self, turns: Sequence[OpenTurn]) -> None:
        if not turns:
            return
        seats, active = self.model.seats, len(self.turns)
        left = {turn.request.trajectory: self.turns.pop(turn.request.trajectory) for turn in turns}
        order = in_front(seats[:active], self.turns)
        for key, seat in zip(order, seats[:active], strict=True):
            if key != seat or key in left:  # ``arrange`` wants to know what is in the rows that move
                self.model.cached_ids[key] = (left.get(key) or self.turns[key]).forwarded_ids
        self.model.arrange([*order, *seats[active:]])
