"""LocalEngine decodes in a thread of its own: the loop goes on, and whatever it does meanwhile is safe."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from local_engine import ask, full_logprobs, llama, request, serve
from sorl_lightning.rollout.engines.local import LocalEngine
from sorl_lightning.rollout.engines.ticket import Ticket
from sorl_lightning.types import Completion

LEFT, RIGHT = request(range(5)), request(range(6), (0, 1))
PATIENCE = 20  # seconds until a test that hangs fails


class Barrier:
    """Stops the model before its forward passes, from the ``first`` on, until it is lifted; notes the threads."""

    def __init__(self) -> None:
        self.reached, self.lifted = threading.Event(), threading.Event()
        self.first = 1
        self.passes = 0
        self.threads: set[tuple[str, int]] = set()

    def __call__(self, *_: Any) -> None:
        self.threads.add((threading.current_thread().name, torch.get_num_threads()))
        self.passes += 1
        if self.passes >= self.first:
            self.reached.set()
            assert self.lifted.wait(PATIENCE)

    def __deepcopy__(self, memory: Any) -> Barrier:
        return self  # the engine's copy of the model stops here too

    async def arrive(self) -> None:
        """Until the model has been stopped."""
        while not self.reached.is_set():
            await asyncio.sleep(0.001)


@pytest.fixture
def barrier() -> Iterator[Barrier]:
    barrier = Barrier()
    yield barrier
    barrier.lifted.set()


Stopped = Callable[..., LocalEngine]


@pytest.fixture(params=["rounds", "continuous"])
def stopped(request: pytest.FixtureRequest, barrier: Barrier) -> Iterator[Stopped]:
    """Makes an engine that stops at the barrier."""
    engines = []

    def make(**settings: Any) -> LocalEngine:
        model = llama()
        model.register_forward_pre_hook(barrier)
        engines.append(serve(model, batching=request.param, **settings))
        return engines[-1]

    yield make
    barrier.lifted.set()
    for engine in engines:
        engine.close()


def alike(left: Completion, right: Completion) -> bool:
    """But for float rounding."""
    return left.token_ids == right.token_ids and left.logprobs == pytest.approx(right.logprobs, abs=1e-5)


def decoders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("decoder")]


def run(coroutine: Any) -> Any:
    async def in_time() -> Any:
        return await asyncio.wait_for(coroutine, PATIENCE)

    return asyncio.run(in_time())


def start(engine: LocalEngine, *requests: Any) -> list[asyncio.Task[Completion]]:
    for asked in requests:
        engine.open(asked.trajectory)
    return [asyncio.ensure_future(engine.generate(asked)) for asked in requests]


def test_the_loop_goes_on_while_a_turn_is_decoded(barrier: Barrier, stopped: Stopped) -> None:
    engine = stopped()

    async def play() -> list[Completion]:
        turns = start(engine, LEFT, RIGHT)
        await barrier.arrive()
        assert not any(turn.done() for turn in turns)
        barrier.lifted.set()
        return await asyncio.gather(*turns)

    assert all(map(alike, run(play()), ask(serve(llama()), LEFT, RIGHT)))


def test_all_is_decoded_in_one_thread_with_the_callers_number_of_threads(barrier: Barrier, stopped: Stopped) -> None:
    barrier.lifted.set()
    engine, threads = stopped(), torch.get_num_threads()
    for _ in range(3):
        ask(engine, LEFT, RIGHT)
    assert barrier.threads == {("decoder_0", threads)}


def test_a_turn_cancelled_while_it_is_decoded_holds_nobody_up(barrier: Barrier, stopped: Stopped) -> None:
    engine = stopped()

    async def play() -> tuple[Completion, Completion]:
        doomed, other = start(engine, LEFT, RIGHT)
        await barrier.arrive()
        doomed.cancel()
        await asyncio.gather(doomed, return_exceptions=True)
        assert doomed.cancelled()
        assert not other.done()
        barrier.lifted.set()
        await other
        second = await engine.generate(RIGHT)  # of the cancelled one nobody is in the way
        both = await asyncio.gather(engine.generate(LEFT), engine.generate(RIGHT))  # and once it asks, it plays on
        return second, both[0]

    second, left = run(play())
    assert alike(second, *ask(serve(llama()), RIGHT))
    assert alike(left, *ask(serve(llama()), LEFT))


def test_one_that_asks_again_while_its_cancelled_turn_is_decoded_is_served(barrier: Barrier, stopped: Stopped) -> None:
    engine = stopped()

    next_turn = request(RIGHT.prompt_ids, seed=4)

    async def play() -> Completion:
        [doomed] = start(engine, LEFT)
        await barrier.arrive()
        with pytest.raises(RuntimeError, match="waits for a turn already"):
            await engine.generate(LEFT)
        doomed.cancel()
        await asyncio.gather(doomed, return_exceptions=True)
        again = asyncio.ensure_future(engine.generate(next_turn))
        await asyncio.sleep(0.01)
        barrier.lifted.set()
        return await again

    assert alike(run(play()), *ask(serve(llama()), next_turn))


def test_caches_dropped_while_a_turn_is_decoded_are_dropped_after_it(barrier: Barrier, stopped: Stopped) -> None:
    engine = stopped()
    barrier.first = 3

    async def play() -> Completion:
        [turn] = start(engine, LEFT)
        await barrier.arrive()
        engine.drop_caches()
        barrier.lifted.set()
        return await turn

    turn = run(play())
    assert alike(turn, *ask(serve(llama()), LEFT))
    before = engine.forwarded_tokens
    longer = request((*LEFT.prompt_ids, *turn.token_ids))
    ask(engine, longer, opens=False)
    assert engine.forwarded_tokens - before == len(longer.prompt_ids) + longer.max_tokens - 1


def test_a_trajectory_released_while_it_is_decoded_leaves_nothing_behind(barrier: Barrier, stopped: Stopped) -> None:
    engine = stopped()
    barrier.first = 3

    async def play() -> None:
        [turn] = start(engine, LEFT)
        await barrier.arrive()
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
        engine.release(LEFT.trajectory)
        barrier.lifted.set()

    run(play())
    assert all(map(alike, ask(engine, LEFT, RIGHT), ask(serve(llama()), LEFT, RIGHT)))


def test_weights_wait_for_the_turn_in_flight(barrier: Barrier, stopped: Stopped) -> None:
    engine, old, new = stopped(version=3), llama(0), llama(1)
    barrier.first = 3

    async def play() -> tuple[Completion, Completion]:
        [turn] = start(engine, LEFT)
        await barrier.arrive()
        with ThreadPoolExecutor(1) as trainer:
            loading = trainer.submit(engine.load_weights, new.state_dict().items(), 4)
            await asyncio.sleep(0.05)
            assert not loading.done()
            barrier.lifted.set()
            first = await turn
            loading.result(PATIENCE)
        return first, await engine.generate(LEFT)

    first, second = run(play())
    assert (set(first.policy_version), set(second.policy_version)) == ({3}, {4})
    assert first.logprobs == pytest.approx(full_logprobs(old, LEFT, first), abs=1e-5)
    assert second.logprobs == pytest.approx(full_logprobs(new, LEFT, second), abs=1e-5)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["in-the-loop", "in-another-thread"])
def test_closing_fails_turns_in_flight_and_ends_the_thread(barrier: Barrier, stopped: Stopped, elsewhere: bool) -> None:
    before = len(decoders())
    engine = stopped()
    barrier.first = 2

    async def play() -> list[Any]:
        turns = start(engine, LEFT, RIGHT)
        await barrier.arrive()
        assert len(decoders()) == before + 1
        threading.Timer(0.05, barrier.lifted.set).start()
        if elsewhere:
            await asyncio.to_thread(engine.close)
        else:
            engine.close()
        engine.close()
        assert len(decoders()) == before
        return await asyncio.gather(*turns, return_exceptions=True)

    errors = run(play())
    assert [str(error) for error in errors] == ["LocalEngine was closed while a turn was waited for"] * 2
    assert barrier.passes == 2  # the token that it was at, and no other


def test_a_loop_that_was_closed_meanwhile_is_no_error(barrier: Barrier, stopped: Stopped) -> None:
    engine = stopped()
    loop = asyncio.new_event_loop()

    async def ask_and_leave() -> tuple[asyncio.Task[Completion], Ticket]:
        [turn] = start(engine, LEFT)
        await barrier.arrive()
        return turn, Ticket(LEFT)

    turn, ticket = loop.run_until_complete(ask_and_leave())
    turn.cancel()
    loop.run_until_complete(asyncio.gather(turn, return_exceptions=True))
    loop.close()
    ticket.answer(Completion(token_ids=(1,), logprobs=(0.0,), finish_reason="stop", policy_version=(0,)))
    ticket.fail(KeyError("nobody hears"))
    barrier.lifted.set()
    engine.release(LEFT.trajectory)
    assert alike(*ask(engine, RIGHT), *ask(serve(llama()), RIGHT))
