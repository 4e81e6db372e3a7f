"""Who holds the loop up is named, once a place, and awaiting is no offence."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator

import pytest
from lightning.pytorch import Callback

from conftest import agent
from distilling import rollouts
from doubles import Countdown, ScriptedEngine
from sorl_lightning.rollout import loop_watchdog
from sorl_lightning.rollout.event_loop import EventLoopThread
from sorl_lightning.rollout.loop_watchdog import LoopWatchdog


def sleep_on_the_job(seconds: float) -> None:
    time.sleep(seconds)


class World:
    async def step(self, seconds: float) -> None:
        await asyncio.sleep(0)
        sleep_on_the_job(seconds)


async def many(tasks: int, seconds: float) -> None:
    await asyncio.gather(*(World().step(seconds) for _ in range(tasks)))


@pytest.fixture
def loop() -> Iterator[EventLoopThread]:
    loop = EventLoopThread()
    yield loop
    loop.close()


def functions(watchdog: LoopWatchdog) -> list[str]:
    return ["" if place is None else place.function for place in watchdog.places]


def test_a_block_is_named_with_its_length(loop: EventLoopThread, caplog: pytest.LogCaptureFixture) -> None:
    loop.run(World().step(0.3))
    loop.close()
    assert 0.3 <= loop.watchdog.longest < 1.0  # the machine may be busy
    assert loop.watchdog.count == 1
    [function] = functions(loop.watchdog)
    assert function.endswith("sleep_on_the_job")
    [message] = [record.getMessage() for record in caplog.records]
    line = sleep_on_the_job.__code__.co_firstlineno + 1
    assert f"stood still for {loop.watchdog.longest:.2f} s" in message
    assert f"{function} ({__file__}:{line})" in message
    assert "tasks in a row" not in message


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five times the threshold, which a busy machine does not reach by itself."""
    monkeypatch.setattr(loop_watchdog, "THRESHOLD", 0.5)
    monkeypatch.setattr(loop_watchdog, "NOTICED", 0.45)


def test_awaiting_blocks_nobody(patient: None, loop: EventLoopThread, caplog: pytest.LogCaptureFixture) -> None:
    loop.run(asyncio.sleep(0.8))
    loop.run(many(10, 0.0005))
    loop.close()
    assert (loop.watchdog.count, caplog.records) == (0, [])
    assert 0.0 < loop.watchdog.take_longest() < 0.5
    assert loop.watchdog.longest == 0.0


def test_a_place_is_logged_once_and_counted_always(loop: EventLoopThread, caplog: pytest.LogCaptureFixture) -> None:
    loop.run(World().step(0.3))
    loop.run(World().step(0.5))
    loop.close()
    assert len(caplog.records) == 1
    [blocks] = loop.watchdog.places.values()
    assert blocks.count == 2
    assert 0.5 <= blocks.longest < 1.0


def test_many_short_steps_in_a_row_are_told_from_a_long_one(
    loop: EventLoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sorl_lightning.rollout.loop_watchdog")
    loop.run(many(15, 0.02))
    loop.close()
    [record] = caplog.records
    assert "tasks in a row" in record.getMessage()
    assert record.levelno == logging.INFO  # no step is too long by itself
    assert 0.3 <= loop.watchdog.longest < 1.0


class Held:
    """A call in C that lets no other thread run before it is over."""

    async def step(self) -> None:
        sum(range(60_000_000))


def test_a_pause_of_the_whole_process_is_nobodys_fault(loop: EventLoopThread, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sorl_lightning.rollout.loop_watchdog")
    loop.run(Held().step())
    loop.close()
    assert loop.watchdog.count == 1
    assert loop.watchdog.longest > 0.1
    assert [record.levelno for record in caplog.records] == [logging.INFO]


def test_just_over_the_threshold_is_seen_too(patient: None, loop: EventLoopThread) -> None:
    """However the look-outs fall: a block is named wherever it begins between two of them."""
    for pause in range(8):
        loop.run(asyncio.sleep(0.06 * pause))
        loop.run(World().step(0.6))
    loop.close()
    assert loop.watchdog.count == 8
    assert all(function.endswith("sleep_on_the_job") for function in functions(loop.watchdog))


def test_each_loop_has_its_own_and_none_leaves_a_thread(patient: None, caplog: pytest.LogCaptureFixture) -> None:
    before, loops = threading.active_count(), [EventLoopThread() for _ in range(3)]
    blocked, *others = loops
    waiting = [loop.submit(asyncio.sleep(0.7)) for loop in others]
    blocked.run(World().step(0.7))
    assert threading.active_count() == before + 6
    for future in waiting:
        future.result()
    for loop in loops:
        loop.close()
        loop.close()
    assert [loop.watchdog.count for loop in loops] == [1, 0, 0]
    assert threading.active_count() == before
    blocked.run(World().step(0.7))  # a second life
    blocked.close()
    assert blocked.watchdog.count == 2
    assert len(caplog.records) == 1
    assert caplog.records[0].levelno == logging.WARNING


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_the_longest_pause_of_a_collection_is_logged(fit, max_staleness: int) -> None:
    """Each collection's own: an environment that is slow in the first alone."""
    slow = [1.5]
    environment = Countdown([1] * 8, fails=lambda task, attempt, text=None: time.sleep(slow.pop() if slow else 0.0))
    pauses = []

    class Pauses(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            pauses.append(float(trainer.callback_metrics["throughput/loop_pause_seconds"]))

    data = rollouts(environment, ScriptedEngine(), max_staleness=max_staleness)
    fit(agent(), data, callbacks=[Pauses()], max_epochs=3)
    assert 1.5 <= pauses[0] < 3.0
    assert max(pauses[1:]) < 1.0
