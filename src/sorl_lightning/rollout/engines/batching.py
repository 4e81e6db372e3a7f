"""Which requests are decoded together, and when: what the ways to do it share."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

from sorl_lightning.rollout.engine import GenerationRequest, TrajectoryKey
from sorl_lightning.rollout.engines.cached_model import CachedModel
from sorl_lightning.rollout.engines.ticket import Ticket
from sorl_lightning.types import Completion


class Batching(ABC):
    """Takes requests in the event loop, and decodes them in one thread of its own while the loop goes on.

    Args:
        model: computes.
    """

    def __init__(self, model: CachedModel) -> None:
        self.model = model
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="decoder")
        self._lock = threading.Lock()  # of all that follows: several threads take part
        self._open: set[TrajectoryKey] = set()
        self._asked: dict[TrajectoryKey, Ticket] = {}
        self._closed = False

    def open(self, trajectory: TrajectoryKey) -> None:
        """Expect requests of this trajectory, until it is released.

        Raises:
            RuntimeError: it is open already.
        """
        with self._lock:
            if trajectory in self._open:
                raise RuntimeError(f"{trajectory} is open already; release it first")
            self._open.add(trajectory)

    async def generate(self, request: GenerationRequest) -> Completion:
        """Generate one turn.

        Raises:
            RolloutError: the model computed NaN.
            RuntimeError: the trajectory is not open, or waits for another turn, or the engine is closed meanwhile.
        """
        key, ticket = request.trajectory, Ticket(request)
        with self._lock:
            self._check(key)
            self._asked[key] = ticket
            self._enter(ticket)
        try:
            return await ticket.completion
        except asyncio.CancelledError:
            with self._lock:
                self._cancelled(ticket)
            raise
        finally:
            with self._lock:
                if self._asked.get(key) is ticket:
                    del self._asked[key]

    def release(self, trajectory: TrajectoryKey) -> None:
        """Expect no more of this trajectory. One that is not open is ignored."""
        with self._lock:
            if trajectory in self._open and not self._closed:
                self._open.remove(trajectory)
                self._released(trajectory)

    def close(self) -> None:
        """End the thread, after the forward pass that it is at; whoever waits for a turn gets an error."""
        with self._lock:
            self._closed = True
            tickets = list(self._asked.values())
        self.model.stop()
        for ticket in tickets:
            ticket.fail(RuntimeError("LocalEngine was closed while a turn was waited for"))
        self._worker.shutdown(cancel_futures=True)

    @abstractmethod
    def drop_caches(self) -> None:
        """Forget keys and values, after the turns that are in flight."""
        ...

    @abstractmethod
    def between_turns(self) -> AbstractContextManager[object]:
        """Wait until no turn is in flight; none begins before the end."""
        ...

    @abstractmethod
    def _enter(self, ticket: Ticket) -> None:
        """A request has come. Called with the lock held, like those below."""
        ...

    @abstractmethod
    def _cancelled(self, ticket: Ticket) -> None:
        """Nobody waits for this turn any more."""
        ...

    @abstractmethod
    def _released(self, trajectory: TrajectoryKey) -> None:
        """A trajectory has ended."""
        ...

    def _check(self, key: TrajectoryKey) -> None:
        if self._closed:
            raise RuntimeError("LocalEngine is closed")
        if key not in self._open:
            raise RuntimeError(f"{key} is not open; open it before its first request")
        if key in self._asked:
            raise RuntimeError(f"{key} waits for a turn already")
