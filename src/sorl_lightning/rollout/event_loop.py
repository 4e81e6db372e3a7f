"""A place for coroutines to run, also where the main thread has a loop of its own (notebooks)."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from sorl_lightning.rollout.loop_watchdog import LoopWatchdog

T = TypeVar("T")


class EventLoopThread:
    """One asyncio loop in a thread of its own, started at first use and kept for connections that outlive a call.

    Attributes:
        watchdog: who held the loop up for longer than 0.1 s, and for how long.
    """

    def __init__(self) -> None:
        self.watchdog = LoopWatchdog()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run to the end and return the result; an interrupt cancels the coroutine."""
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def settle(self, answer: T | Awaitable[T]) -> T:
        """What a method that may be plain or a coroutine has returned: itself, or what it comes to in this loop."""
        return self.run(_awaited(answer)) if inspect.isawaitable(answer) else answer

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start, and return at once; cancelling the future cancels the coroutine."""
        if self._loop is None:
            self._loop = self.watchdog.new_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
            self._thread.start()
            self.watchdog.start(self._loop, self._thread)
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Stop the loop and its thread. Safe to call twice."""
        if self._loop is None or self._thread is None:
            return
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self.watchdog.stop()
        self._loop.close()
        self._loop = self._thread = None

    async def _cancel_all(self) -> None:
        """End what still runs, so that nobody waits for ever for its result."""
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable
