"""Coroutines run to their end wherever the caller stands."""

from __future__ import annotations

import asyncio
import threading

import pytest

from sorl_lightning.rollout.event_loop import EventLoopThread


async def double(value: int) -> int:
    await asyncio.sleep(0)
    return 2 * value


async def fail() -> None:
    raise KeyError("inside")


def test_results_errors_and_a_second_life() -> None:
    before = threading.active_count()
    loop = EventLoopThread()
    assert loop.run(double(2)) == 4
    with pytest.raises(KeyError, match="inside"):
        loop.run(fail())
    loop.close()
    loop.close()
    assert loop.run(double(3)) == 6
    loop.close()
    assert threading.active_count() == before


def test_inside_a_running_loop_as_in_a_notebook() -> None:
    async def cell() -> int:
        loop = EventLoopThread()
        try:
            return loop.run(double(5))
        finally:
            loop.close()

    assert asyncio.run(cell()) == 10
