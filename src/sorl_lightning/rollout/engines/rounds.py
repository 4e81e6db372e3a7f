"""Decode in rounds: every open trajectory asks for its next turn before any is decoded."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from sorl_lightning.rollout.engine import GenerationRequest, TrajectoryKey
from sorl_lightning.rollout.engines.ticket import Ticket
from sorl_lightning.rollout.engines.turn_decoder import TurnDecoder
from sorl_lightning.types import Completion


class Rounds:
    """Gathers requests in the event loop, and decodes round after round in one thread of its own.

    The loop goes on meanwhile. A trajectory whose request was cancelled is not waited for until it asks again; a turn
    that was being decoded for it is decoded to its end, for nobody.

    Args:
        decoder: decodes.
    """

    def __init__(self, decoder: TurnDecoder) -> None:
        self.decoder = decoder
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="decoder")
        self._lock = threading.Lock()  # of all that follows: close comes from any thread
        self._open: set[TrajectoryKey] = set()
        self._withdrawn: set[TrajectoryKey] = set()
        self._waiting: dict[TrajectoryKey, Ticket] = {}
        self._decoding: dict[TrajectoryKey, Ticket] = {}
        self._closed = False

    def open(self, trajectory: TrajectoryKey) -> None:
        """Wait for this trajectory in every round, until it is released.

        Raises:
            RuntimeError: it is open already.
        """
        with self._lock:
            if trajectory in self._open:
                raise RuntimeError(f"{trajectory} is open already; release it first")
            self._open.add(trajectory)

    async def generate(self, request: GenerationRequest) -> Completion:
        """Generate one turn, in the next round.

        Raises:
            RolloutError: the model computed NaN.
            RuntimeError: the trajectory is not open, or waits for another turn, or the engine is closed meanwhile.
        """
        key, ticket = request.trajectory, Ticket(request)
        with self._lock:
            self._check(key)
            self._waiting[key] = ticket
            self._withdrawn.discard(key)
        self._schedule_round()
        try:
            return await ticket.completion
        except asyncio.CancelledError:
            self._withdraw(ticket)
            raise
        finally:
            with self._lock:
                if self._decoding.get(key) is ticket:
                    del self._decoding[key]

    def release(self, trajectory: TrajectoryKey) -> None:
        """Wait for this trajectory no longer. One that is not open is ignored."""
        with self._lock:
            self._open.discard(trajectory)
            self._withdrawn.discard(trajectory)
            last = not self._open
        if last:
            self.drop_caches()
        self._schedule_round()

    def drop_caches(self) -> None:
        """Forget keys and values, after the rounds that are on their way."""
        with self._lock:
            if not self._closed:
                self._worker.submit(self.decoder.clear)

    def close(self) -> None:
        """End the thread, after the token that it is at; whoever waits for a turn gets an error."""
        with self._lock:
            self._closed = True
            tickets = [*self._waiting.values(), *self._decoding.values()]
            self._waiting.clear()
        self.decoder.stop()
        for ticket in tickets:
            ticket.fail(RuntimeError("LocalEngine was closed while a turn was waited for"))
        self._worker.shutdown(cancel_futures=True)

    def _check(self, key: TrajectoryKey) -> None:
        if self._closed:
            raise RuntimeError("LocalEngine is closed")
        if key not in self._open:
            raise RuntimeError(f"{key} is not open; open it before its first request")
        if key in self._waiting or key in self._decoding:
            raise RuntimeError(f"{key} waits for a turn already")

    def _withdraw(self, ticket: Ticket) -> None:
        key = ticket.request.trajectory
        with self._lock:
            if self._waiting.get(key) is ticket:
                del self._waiting[key]
            if key in self._open:
                self._withdrawn.add(key)
        self._schedule_round()

    def _missing(self, asked: int) -> bool:
        """Whether somebody is waited for, where so many have asked."""
        return asked < len(self._open) - len(self._withdrawn)

    def _schedule_round(self) -> None:
        with self._lock:
            if self._waiting and not self._missing(len(self._waiting)):
                # Later in the loop and not here: whoever closes the round is no different from the others.
                loop = next(iter(self._waiting.values())).completion.get_loop()
                loop.call_soon_threadsafe(self._start_round)

    def _start_round(self) -> None:
        with self._lock:
            asked = {key: ticket for key, ticket in sorted(self._waiting.items()) if not ticket.completion.done()}
            if not asked or self._missing(len(asked)):
                return
            self._waiting.clear()
            self._decoding.update(asked)
            self._worker.submit(self._decode, list(asked.values()))

    def _decode(self, tickets: list[Ticket]) -> None:
        """In the thread."""
        try:
            completions = self.decoder.decode([ticket.request for ticket in tickets])
        except BaseException as error:  # nobody may wait for ever
            for ticket in tickets:
                ticket.fail(error)
            return
        for ticket in tickets:
            ticket.answer(completions[ticket.request.trajectory])
