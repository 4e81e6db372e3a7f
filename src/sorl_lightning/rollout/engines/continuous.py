"""Decode continuously: a turn begins as soon as there is room, and ends when it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sorl_lightning.rollout.engine import TrajectoryKey
from sorl_lightning.rollout.engines.batching import Batching
from sorl_lightning.rollout.engines.cached_model import CachedModel
from sorl_lightning.rollout.engines.open_turn import OpenTurn
from sorl_lightning.rollout.engines.running_batch import RunningBatch
from sorl_lightning.rollout.engines.ticket import Ticket


class Continuous(Batching):
    """Requests join the batch in flight at its next token, first come first served.

    Args:
        model: computes.
        max_batch: most turns in flight.
    """

    def __init__(self, model: CachedModel, max_batch: int) -> None:
        super().__init__(model)
        self.max_batch = max_batch
        self._arrived: list[Ticket] = []  # in this pass of the loop
        self._waiting: list[Ticket] = []
        self._gone: list[TrajectoryKey] = []  # released, and not yet forgotten
        self._dropping = False  # caches, as soon as no turn is in flight
        self._held = 0  # by how many no turn may begin
        self._running = False
        # Of the thread alone:
        self._batch = RunningBatch(model)
        self._flying: dict[TrajectoryKey, Ticket] = {}

    def drop_caches(self) -> None:
        """Forget keys and values once the turns in flight have ended; no other begins before."""
        with self._lock:
            self._dropping = True
            self._wake()

    @contextmanager
    def between_turns(self) -> Iterator[None]:
        """Wait until the turns in flight have ended; those that are asked for meanwhile wait."""
        with self._lock:
            self._held += 1
        try:
            with self.model.lock:
                yield
        finally:
            with self._lock:
                self._held -= 1
                self._wake()

    def _enter(self, ticket: Ticket) -> None:
        self._arrived.append(ticket)
        # What is asked for in one pass of the loop begins together: siblings share their prompt.
        ticket.completion.get_loop().call_soon(self._line_up)

    def _line_up(self) -> None:
        with self._lock:
            self._waiting += sorted(self._arrived, key=lambda ticket: ticket.request.trajectory)
            self._arrived.clear()
            self._wake()

    def _cancelled(self, ticket: Ticket) -> None:
        self._wake()  # for the thread to find it so

    def _released(self, trajectory: TrajectoryKey) -> None:
        self._gone.append(trajectory)
        self._dropping |= not self._open
        self._wake()

    def _wake(self) -> None:
        if not (self._running or self._held or self._closed):
            self._running = True
            self._worker.submit(self._run)

    # In the thread

    def _run(self) -> None:
        with self.model.lock, torch.inference_mode():
            while self._tidied() and self._advance():
                pass

    def _tidied(self) -> bool:
        """Forget who has gone, and go on unless there is nothing to do."""
        self._batch.give_up([key for key, ticket in self._flying.items() if ticket.completion.done()])
        self._flying = {key: self._flying[key] for key in self._batch.turns}
        with self._lock:
            gone = [key for key in self._gone if key not in self._flying]
            self._gone = [key for key in self._gone if key in self._flying]
            drop = self._dropping and not self._flying
            self._dropping &= not drop
            self._waiting = [ticket for ticket in self._waiting if not ticket.completion.done()]
            self._running = bool(self._flying or (self._waiting and not self._held)) and not self._closed
            running = self._running
        if drop:
            self._batch.clear()
        self._batch.forget(gone)
        return running

    def _advance(self) -> bool:
        """Let turns begin where there is room, and draw a token of all."""
        try:
            self._begin()
            if self._batch.turns:
                self._answer(self._batch.step())
        except BaseException as error:  # nobody may wait for ever
            for ticket in self._flying.values():
                ticket.fail(error)
            self._flying.clear()
            self._batch.clear()
        return True

    def _begin(self) -> None:
        with self._lock:
            room = 0 if self._held or self._dropping else self.max_batch - len(self._flying)
            free = [ticket for ticket in self._waiting if ticket.request.trajectory not in self._flying] if room else []
            beginning, expected = free[:room], len(self._open)
            self._waiting = [ticket for ticket in self._waiting if ticket not in beginning]
        if beginning:
            self._flying.update((ticket.request.trajectory, ticket) for ticket in beginning)
            if self.model.version is None:
                raise RuntimeError("LocalEngine has no weights; call load_weights first")
            self._answer(self._batch.admit([ticket.request for ticket in beginning], expected))

    def _answer(self, ended: list[OpenTurn]) -> None:
        for turn in ended:
            assert self.model.version is not None
            self._flying.pop(turn.request.trajectory).answer(turn.completion(self.model.version))
