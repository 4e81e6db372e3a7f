"""Decode in rounds: every open trajectory asks for its next turn before any is decoded."""

from __future__ import annotations

from contextlib import AbstractContextManager

from sorl_lightning.rollout.engine import TrajectoryKey
from sorl_lightning.rollout.engines.batching import Batching
from sorl_lightning.rollout.engines.cached_model import CachedModel
from sorl_lightning.rollout.engines.ticket import Ticket
from sorl_lightning.rollout.engines.turn_decoder import TurnDecoder


class Rounds(Batching):
    """Once every open trajectory has asked, their turns are decoded together.

    A trajectory whose request was cancelled is not waited for until it asks again; a turn that was being decoded for it
    is decoded to its end, for nobody.

    Args:
        model: computes.
        max_batch: most trajectories in one forward pass.
    """

    def __init__(self, model: CachedModel, max_batch: int) -> None:
        super().__init__(model)
        self._decoder = TurnDecoder(model, max_batch)
        self._waiting: dict[TrajectoryKey, Ticket] = {}
        self._withdrawn: set[TrajectoryKey] = set()

    def drop_caches(self) -> None:
        """Forget keys and values, after the rounds that are on their way."""
        with self._lock:
            self._clear()

    def between_turns(self) -> AbstractContextManager[object]:
        """Between two rounds."""
        return self.model.lock

    def _enter(self, ticket: Ticket) -> None:
        key = ticket.request.trajectory
        self._waiting[key] = ticket
        self._withdrawn.discard(key)
        self._schedule()

    def _cancelled(self, ticket: Ticket) -> None:
        key = ticket.request.trajectory
        if self._waiting.get(key) is ticket:
            del self._waiting[key]
        if key in self._open:
            self._withdrawn.add(key)
        self._schedule()

    def _released(self, trajectory: TrajectoryKey) -> None:
        self._withdrawn.discard(trajectory)
        if not self._open:
            self._clear()
        self._schedule()

    def _clear(self) -> None:
        if not self._closed:
            self._worker.submit(self.model.clear)

    def _schedule(self) -> None:
        if self._waiting and not self._missing(len(self._waiting)):
            # Later in the loop and not here: whoever closes the round is no different from the others.
            loop = next(iter(self._waiting.values())).completion.get_loop()
            loop.call_soon_threadsafe(self._start)

    def _missing(self, asked: int) -> bool:
        """Whether somebody is waited for, where so many have asked."""
        return asked < len(self._open) - len(self._withdrawn)

    def _start(self) -> None:
        with self._lock:
            asked = [ticket for _, ticket in sorted(self._waiting.items()) if not ticket.completion.done()]
            if asked and not self._closed and not self._missing(len(asked)):
                self._waiting.clear()
                self._worker.submit(self._decode, asked)

    def _decode(self, tickets: list[Ticket]) -> None:
        """In the thread."""
        try:
            completions = self._decoder.decode([ticket.request for ticket in tickets])
        except BaseException as error:  # nobody may wait for ever
            for ticket in tickets:
                ticket.fail(error)
            return
        for ticket in tickets:
            ticket.answer(completions[ticket.request.trajectory])
