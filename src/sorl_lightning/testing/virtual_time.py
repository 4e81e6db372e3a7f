"""An event loop whose clock jumps to the next timer: what sleeps for hours is over at once, and to the digit."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Nothing but timers takes time in it. Do not wait in it for other threads or processes."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        """Seconds since the loop was made, as its timers count."""
        return self._now

    def jump(self, seconds: float) -> None:
        """Put the clock forward."""
        self._now += seconds


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._virtual = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events and timeout is None:
            raise RuntimeError("every coroutine waits for something that no timer will bring")
        if not events and timeout is not None:
            self._virtual.jump(max(timeout, 0.0))
        return events


def run_in_virtual_time(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run to the end in a loop of its own; what still runs then is cancelled."""
    loop = VirtualTimeLoop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        running = asyncio.all_tasks(loop)
        for task in running:
            task.cancel()
        loop.run_until_complete(_settled(running))
        loop.close()


async def _settled(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
