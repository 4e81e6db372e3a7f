"""The collector keeps exact books: endings, limits, failures, groups."""

from __future__ import annotations

import asyncio

import pytest

from doubles import Countdown, ScriptedEngine
from sorl_lightning.errors import ConfigurationError, RolloutError
from sorl_lightning.rollout.collector import Collection, Collector, Sampling
from sorl_lightning.types import Ending


def collect(chat, environment, engine=None, group_size=1, max_turns=8, context_limit=256, max_tokens=4, **settings):
    sampling = Sampling(max_tokens=max_tokens, context_limit=context_limit, temperature=1.0)
    engine = engine or ScriptedEngine()
    collector = Collector(environment, engine, chat, sampling, group_size, **settings)
    tasks = environment.tasks("train")
    collection: Collection = asyncio.run(collector.collect(tasks, max_turns, seed=3, index=0))
    assert not engine.live
    return collection


def test_turn_k_plus_1_begins_with_what_the_engine_saw_and_said(chat) -> None:
    (trajectory,) = collect(chat, Countdown([3])).trajectories
    for turn, following in zip(trajectory.turns, trajectory.turns[1:], strict=False):
        seen = (*turn.prompt_ids, *turn.completion.token_ids)
        assert following.prompt_ids[: len(seen)] == seen


def test_endings_and_rewards(chat) -> None:
    trajectories = collect(chat, Countdown([1, 3, 9]), max_turns=3).trajectories
    assert [t.ending for t in trajectories] == [Ending.DONE, Ending.DONE, Ending.TURN_LIMIT]
    assert [len(t.turns) for t in trajectories] == [1, 3, 3]
    for trajectory in trajectories:
        assert trajectory.reward == sum(len(turn.text) % 2 for turn in trajectory.turns)
        assert trajectory.success == (len(trajectory.turns[-1].text) % 2 == 1)
        assert trajectory.metrics == {"length": len(trajectory.turns[-1].text)}


def test_a_reward_can_be_a_callable(chat) -> None:
    trajectories = collect(chat, Countdown([2]), reward=lambda trajectory: 10.0 * len(trajectory.turns)).trajectories
    assert [t.reward for t in trajectories] == [20.0]


def test_the_context_limit_shortens_the_request_and_then_ends_the_episode(chat) -> None:
    opening = len(chat.opening([{"role": "user", "content": "count down from 9"}]))
    engine = ScriptedEngine(lambda request: ([400] * 8, [-1.0] * 8))
    (trajectory,) = collect(chat, Countdown([9]), engine, context_limit=opening + 2, max_tokens=8).trajectories
    assert [request.max_tokens for request in engine.requests] == [2]
    assert trajectory.turns[0].completion.finish_reason == "length"
    assert trajectory.ending is Ending.CONTEXT_LIMIT


def test_a_finished_episode_is_done_whatever_its_length(chat) -> None:
    opening = len(chat.opening([{"role": "user", "content": "count down from 1"}]))
    engine = ScriptedEngine(lambda request: ([400] * 8, [-1.0] * 8))
    (trajectory,) = collect(chat, Countdown([1]), engine, context_limit=opening + 2, max_tokens=8).trajectories
    assert trajectory.ending is Ending.DONE


def test_an_empty_completion_is_a_turn_without_tokens(chat) -> None:
    (trajectory,) = collect(chat, Countdown([1]), ScriptedEngine(lambda request: ([], []))).trajectories
    assert trajectory.generated_tokens == 0
    assert trajectory.reward == 0.0


def test_a_first_prompt_that_leaves_no_room_is_refused_before_anything_is_sampled(chat) -> None:
    engine = ScriptedEngine()
    with pytest.raises(ConfigurationError, match=r"task 'train-0' has \d+ tokens.*context_limit=3"):
        collect(chat, Countdown([1, 2]), engine, context_limit=3)
    assert engine.requests == []


def fails_at(task_id, attempts, stage="step"):
    def fails(task, attempt, text=None):
        if task.id == task_id and attempt in attempts and (text is None) == (stage == "reset"):
            raise OSError("the world ended")

    return fails


@pytest.mark.parametrize("stage", ["reset", "step"])
def test_a_failed_environment_is_retried_with_a_fresh_one(chat, stage) -> None:
    environment = Countdown([2, 2], fails_at("train-1", {1, 2}, stage))
    collection = collect(chat, environment, retries=2)
    assert environment.resets == {"train-0": 1, "train-1": 3}
    assert collection.failures == ()
    assert [t.ending for t in collection.trajectories] == [Ending.DONE] * 2


def test_a_group_that_keeps_failing_is_dropped_whole_and_counted_and_never_a_reward(chat) -> None:
    environment = Countdown([2, 2, 2], fails_at("train-1", {2, 3}))  # the other sibling gets through
    collection = collect(chat, environment, group_size=2, retries=1)
    assert [t.group for t in collection.trajectories] == [0, 0, 2, 2]
    assert len(collection.failures) == 1
    assert "Countdown failed at task 'train-1': OSError: the world ended" in collection.failures[0]


def test_when_every_group_fails_all_are_named(chat) -> None:
    environment = Countdown([2], fails_at("train-0", range(9)))
    collection = collect(chat, environment)
    assert collection.trajectories == ()
    assert "the world ended" in collection.failures[0]


def test_an_engine_error_is_not_the_environments_failure(chat) -> None:
    def script(request):
        raise RolloutError("server gone")

    with pytest.raises(RolloutError, match="server gone"):
        collect(chat, Countdown([2, 2]), ScriptedEngine(script))


def test_coroutine_environments(chat) -> None:
    class Slow(Countdown):
        async def reset(self, task):
            await asyncio.sleep(0.01)
            return super().reset(task)

        async def step(self, text):
            await asyncio.sleep(0.01)
            return super().step(text)

    assert [len(t.turns) for t in collect(chat, Slow([2, 1])).trajectories] == [2, 1]


def test_seeds_depend_on_collection_task_sibling_and_turn_alone(chat) -> None:
    engines = [ScriptedEngine(), ScriptedEngine(delay=0.001)]
    for engine in engines:
        collect(chat, Countdown([3, 1, 2]), engine, group_size=2)
    seeds = [sorted((r.trajectory, len(r.prompt_ids), r.seed) for r in engine.requests) for engine in engines]
    assert seeds[0] == seeds[1]
    assert len({seed for *_, seed in seeds[0]}) == len(seeds[0]) == 12
