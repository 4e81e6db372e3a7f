"""A real environment that raises, hangs, or answers with bytes, a megabyte or nothing."""

from __future__ import annotations

import asyncio
import time

import pytest
from shop_server import serving

from doubles import ScriptedEngine
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.collector import Collector, Sampling
from sorl_lightning.rollout.environments import GeneratedShop, ShopServer, WebShop
from sorl_lightning.rollout.packing import pack
from sorl_lightning.types import Ending

SEARCH = "search[red]"


@pytest.fixture(scope="module")
def shop():
    return GeneratedShop(products=100)


class Oddly(WebShop):
    """WebShop whose third answer is ``answer``, or raises it."""

    def __init__(self, shop, answer) -> None:
        super().__init__(shop, test_goals=5, validation_goals=5, rules=False)
        self.answer = answer

    async def step(self, text):
        step = await super().step(text)
        if self._steps < 3:
            return step
        if isinstance(self.answer, Exception):
            raise self.answer
        return step._replace(observation=self.answer)


def collect(chat, environment, tasks=2, max_turns=5, **settings):
    ids = (*chat.tokenizer.encode(SEARCH), chat.stop_token_ids[0])
    engine = ScriptedEngine(lambda request: (ids, [-1.0] * len(ids)))
    sampling = Sampling(max_tokens=32, context_limit=20_000, temperature=1.0)
    collector = Collector(environment, engine, chat, sampling, **settings)
    return asyncio.run(collector.collect(environment.tasks("train")[:tasks], max_turns, seed=0))


def test_an_environment_that_raises_is_tried_again_and_its_groups_never_trained(chat, shop) -> None:
    collection = collect(chat, Oddly(shop, KeyError("price")))
    assert collection.trajectories == ()
    assert collection.failures[0] == "Oddly failed at task 'webshop-10': KeyError: 'price'"


def test_a_server_that_hangs_is_given_up_after_the_timeout(chat, shop) -> None:
    with serving(shop, hangs=True) as url:
        environment = WebShop(ShopServer(url, goals=300, timeout=1.0), test_goals=5, validation_goals=5)
        environment.shop.goal_count = lambda: 300  # the address was checked when the server still answered
        start = time.monotonic()
        collection = collect(chat, environment, retries=1, step_timeout=0.2)
        assert collection.trajectories == ()
        assert all("TimeoutError: no answer within step_timeout=0.2 s" in failure for failure in collection.failures)
        assert time.monotonic() - start < 4


def test_a_server_that_hangs_is_named_when_the_tasks_are_listed(shop) -> None:
    with (
        serving(shop, hangs=True) as url,
        pytest.raises(ConfigurationError, match=r"no WebShop server answers.*timed out"),
    ):
        WebShop(ShopServer(url, goals=300, timeout=0.2), test_goals=5, validation_goals=5).tasks("train")


def test_bytes_that_are_no_utf_8_become_question_marks(chat, shop) -> None:
    broken = b"caf\xe9 chair".decode("utf-8", errors="surrogateescape")
    for trajectory in collect(chat, Oddly(shop, broken)).trajectories:
        assert trajectory.turns[2].observation == "caf? chair"
        assert len(trajectory.turns) == 5
        assert "caf? chair" in chat.tokenizer.decode(trajectory.turns[3].prompt_ids)


def test_raw_bytes_are_a_failure(chat, shop) -> None:
    failures = collect(chat, Oddly(shop, b"caf\xe9")).failures
    assert len(failures) == 2
    assert "an observation must be text, got bytes" in failures[0]


def test_a_megabyte_ends_the_trajectory_at_the_context_limit_and_is_not_trained_on(chat, shop) -> None:
    start = time.monotonic()
    trajectories = collect(chat, Oddly(shop, "long " * 200_000)).trajectories
    assert time.monotonic() - start < 20
    for trajectory in trajectories:
        assert trajectory.ending is Ending.CONTEXT_LIMIT
        assert len(trajectory.turns) == 3
    assert pack(trajectories).input_ids.shape[1] < 20_000


def test_an_empty_observation_is_an_empty_message(chat, shop) -> None:
    for trajectory in collect(chat, Oddly(shop, "")).trajectories:
        assert trajectory.turns[2].observation is None
        assert len(trajectory.turns) == 5
        seen = (*trajectory.turns[2].prompt_ids, *trajectory.turns[2].completion.token_ids)
        following = trajectory.turns[3].prompt_ids
        assert following == (*seen, *chat.continuation(trajectory.turns[2].completion.token_ids, ""))
