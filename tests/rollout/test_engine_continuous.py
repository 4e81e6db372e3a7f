"""LocalEngine(batching="continuous"): the same tokens as in rounds, from turns that come and go."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from local_engine import (
    KEYS,
    VOCABULARY,
    ask,
    full_logprobs,
    llama,
    logprobs_of,
    play_all,
    qwen3,
    request,
    serve,
    tokens_of,
)
from sorl_lightning.errors import ConfigurationError, RolloutError
from sorl_lightning.rollout.engine import TrajectoryKey
from sorl_lightning.rollout.engines.cached_model import in_front
from sorl_lightning.rollout.engines.local import LocalEngine
from sorl_lightning.types import Completion

PATIENCE = 20  # seconds until a test that hangs fails


def continuous(model: Any, **settings: Any) -> LocalEngine:
    return serve(model, batching="continuous", **settings)


def run(coroutine: Any) -> Any:
    async def in_time() -> Any:
        return await asyncio.wait_for(coroutine, PATIENCE)

    return asyncio.run(in_time())


@pytest.mark.parametrize("model", [llama(), llama().double(), qwen3()], ids=["llama", "float64", "qwen3"])
@pytest.mark.parametrize("max_batch", [256, 5, 1])
def test_tokens_are_those_of_rounds(model: Any, max_batch: int) -> None:
    rounds, engine = serve(model), continuous(model, max_batch=max_batch)
    wanted, played = play_all(rounds, temperature=0.7), play_all(engine, temperature=0.7)
    assert tokens_of(played) == tokens_of(wanted)
    # Float32 on deliberately wide logits, at a temperature below 1; of float64 models, log-probabilities in float32.
    tolerance = 1e-5 if model.dtype == torch.float64 else 3e-5
    for key in KEYS:
        for logprobs, expected in zip(logprobs_of(played)[key], logprobs_of(wanted)[key], strict=True):
            assert logprobs == pytest.approx(expected, abs=tolerance)
        for asked, completion in played[key]:
            assert completion.logprobs == pytest.approx(full_logprobs(model, asked, completion), abs=tolerance)
    engine.close()


def test_only_new_tokens_are_forwarded_and_shared_openings_once() -> None:
    rounds, engine = serve(llama()), continuous(llama())
    play_all(rounds)
    play_all(engine)
    assert engine.forwarded_tokens == rounds.forwarded_tokens
    engine.close()


def test_interruptions_of_all_kinds_change_no_token() -> None:
    """Trajectories come late and in any order, in a batch too small for all."""
    wanted = tokens_of(play_all(serve(llama())))
    for number in range(5):
        dice = random.Random(number)
        engine = continuous(llama(), max_batch=dice.choice([2, 3, 7]))
        keys = dice.sample(KEYS, len(KEYS))
        played = play_all(engine, keys, delay=lambda key, turn, dice=dice: dice.randrange(40))
        assert {key: tokens_of(played)[key] for key in KEYS} == wanted
        engine.close()


def test_stray_memory_is_never_seen() -> None:
    plain = play_all(continuous(llama(), max_batch=3))
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    try:
        poisoned = play_all(continuous(llama(), max_batch=3))
    finally:
        torch.use_deterministic_algorithms(False)
    assert tokens_of(poisoned) == tokens_of(plain)


def test_a_short_turn_is_answered_while_a_long_one_goes_on() -> None:
    engine = continuous(llama())
    long, short = request(range(5), max_tokens=240), request(range(6), (0, 1), max_tokens=2)

    async def play() -> tuple[int, Completion]:
        for asked in (long, short):
            engine.open(asked.trajectory)
        slow, turns, ids = asyncio.ensure_future(engine.generate(long)), 0, short.prompt_ids
        while not slow.done() and len(ids) < 200:
            completion = await engine.generate(request(ids, (0, 1), max_tokens=2))
            ids, turns = (*ids, *completion.token_ids), turns + 1
        return turns, await slow

    turns, completion = run(play())
    assert turns > 5
    assert completion.token_ids == ask(serve(llama()), long)[0].token_ids
    engine.close()


def test_a_row_that_is_waited_for_keeps_its_keys_and_values() -> None:
    """One pauses between two turns while others come, go and are forgotten around it."""
    engine = continuous(llama(), max_batch=2)

    async def play() -> tuple[int, Completion]:
        first = request(range(10), (5, 0))
        engine.open(first.trajectory)
        completion = await engine.generate(first)
        for number in range(6):
            others = [request(range(3 + number), (number, sibling)) for sibling in range(3)]
            for asked in others:
                engine.open(asked.trajectory) if asked.trajectory != first.trajectory else None
            await asyncio.gather(*(engine.generate(asked) for asked in others if asked.trajectory.task != 5))
            for asked in others:
                if asked.trajectory != first.trajectory:
                    engine.release(asked.trajectory)
        before = engine.forwarded_tokens
        longer = request((*first.prompt_ids, *completion.token_ids, 1, 2), (5, 0), seed=3)
        return before, await engine.generate(longer)

    before, second = run(play())
    assert engine.forwarded_tokens - before == 3 + 5
    [first] = ask(serve(llama()), request(range(10)))
    longer = request((*range(10), *first.token_ids, 1, 2), seed=3)
    assert second.logprobs == pytest.approx(full_logprobs(llama(), longer, second), abs=1e-5)
    engine.close()


def test_a_cancelled_turn_leaves_its_place_and_its_prefix() -> None:
    engine = continuous(llama(), max_batch=1)
    long, other = request(range(8), max_tokens=200), request(range(6), (0, 1))

    async def play() -> tuple[Completion, int, Completion]:
        for asked in (long, other):
            engine.open(asked.trajectory)
        doomed = asyncio.ensure_future(engine.generate(long))
        while engine.forwarded_tokens < 12:
            await asyncio.sleep(0.001)
        waiting = asyncio.ensure_future(engine.generate(other))
        await asyncio.sleep(0)
        doomed.cancel()
        completion = await waiting
        assert doomed.cancelled()
        before = engine.forwarded_tokens
        return completion, before, await engine.generate(request(range(8), seed=9))

    completion, before, again = run(play())
    assert completion.token_ids == ask(serve(llama()), other)[0].token_ids
    assert engine.forwarded_tokens - before == 1 + 5  # its prompt was cached
    assert again.token_ids == ask(serve(llama()), request(range(8), seed=9))[0].token_ids
    engine.close()


def test_nobody_is_left_cached_after_the_last_release() -> None:
    engine = continuous(llama())
    ask(engine, request(range(9)))
    before = engine.forwarded_tokens
    ask(engine, request(range(9)))
    assert engine.forwarded_tokens - before == 9 + 5
    engine.close()


def test_weights_come_between_turns_while_others_wait() -> None:
    old, new = llama(0).double(), llama(1).double()
    engine = continuous(old, version=3, max_batch=2)
    keys = [TrajectoryKey(0, sibling) for sibling in range(6)]

    async def play(key: TrajectoryKey) -> list[tuple[Any, Completion]]:
        ids, played = tuple(range(4 + key.sibling)), []
        for turn in range(12):
            asked = request(ids, key, seed=turn, max_tokens=5)
            completion = await engine.generate(asked)
            played.append((asked, completion))
            ids = (*ids, *completion.token_ids)
        return played

    async def together() -> list[list[tuple[Any, Completion]]]:
        for key in keys:
            engine.open(key)
        playing = [asyncio.ensure_future(play(key)) for key in keys]
        while engine.forwarded_tokens < 60:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(engine.load_weights, new.state_dict().items(), 4)
        return await asyncio.gather(*playing)

    versions = set()
    for played in run(together()):
        for asked, completion in played:
            [version] = set(completion.policy_version)  # no turn is of two
            versions.add(version)
            model = {3: old, 4: new}[version]
            assert completion.logprobs == pytest.approx(full_logprobs(model, asked, completion), abs=1e-5)
    assert versions == {3, 4}
    engine.close()


def test_a_failed_load_is_told_to_all_who_ask() -> None:
    engine = continuous(llama())
    with pytest.raises(ValueError, match="did not come"):
        engine.load_weights([], 1)
    with pytest.raises(RuntimeError, match="no weights"):
        ask(engine, request(range(3)))
    engine.close()


def test_an_error_reaches_those_in_flight_and_leaves_a_clean_engine() -> None:
    engine = continuous(llama())

    async def play() -> list[Any]:
        for sibling in range(3):
            engine.open(TrajectoryKey(0, sibling))
        requests = [request(range(5)), request([VOCABULARY], (0, 1)), request(range(7), (0, 2))]
        return await asyncio.gather(*(engine.generate(r) for r in requests), return_exceptions=True)

    assert [type(error) for error in run(play())] == [IndexError] * 3
    sound = [request(range(5 + sibling), (0, sibling)) for sibling in range(3)]
    answers, wanted = ask(engine, *sound, opens=False), ask(serve(llama()), *sound)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in wanted]
    engine.close()


def test_nan_names_the_trajectory() -> None:
    model = llama()
    torch.nn.init.constant_(model.lm_head.weight, math.nan)
    engine = continuous(model)
    with pytest.raises(RolloutError, match="task 3, sibling 1"):
        ask(engine, request(range(5), (3, 1)))
    engine.close()


def test_other_ways_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"batching must be one of \('rounds', 'continuous'\), got 'both'"):
        LocalEngine(batching="both")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("chosen", "order"), [("", "abcd"), ("a", "abcd"), ("cd", "cdab"), ("bd", "dbca"), ("abcd", "abcd")]
)
def test_in_front_swaps_as_little_as_it_can(chosen: str, order: str) -> None:
    key: Callable[[str], TrajectoryKey] = lambda letter: TrajectoryKey(ord(letter), 0)  # noqa: E731
    assert in_front([key(letter) for letter in "abcd"], {key(letter) for letter in chosen}) == [
        key(letter) for letter in order
    ]
