"""ScienceWorld, the real games in a real Java virtual machine."""

from __future__ import annotations

import asyncio

import pytest

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.contract import check_environment
from sorl_lightning.rollout.environment import open_episode
from sorl_lightning.rollout.environments import ScienceWorld, jvm
from sorl_lightning.rollout.environments import scienceworld_simulator as simulator

SHORT = ("lifespan-longest-lived", "lifespan-shortest-lived")


@pytest.fixture(scope="module")
def world():
    return ScienceWorld(names=SHORT, variations=1)


async def by_the_expert(environment, task, before=()):
    episode = open_episode(environment)
    await episode.reset(task)
    steps = [await episode.step(action) for action in before]
    while not steps or not (steps[-1].terminated or steps[-1].truncated):
        steps.append(await episode.step(episode.expert_action()))
    return steps


def test_the_contract() -> None:
    check_environment(ScienceWorld(names=SHORT[:1], variations=1), episodes=1, max_steps=2)


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_gold_paths_take_the_score_to_1(world, split) -> None:
    for task in world.tasks(split):
        steps = asyncio.run(by_the_expert(world, task))
        assert steps[-1].info == {"success": True, "valid": 1.0, "valid_fraction": 1.0, "score": 1.0}
        # The opening look may have scored already.
        assert 0.7 < sum(step.reward for step in steps) <= 1.0
        assert not any(step.terminated for step in steps[:-1])


def test_splits_are_the_published_variations() -> None:
    environment = ScienceWorld(names=["find-plant"])
    splits = [[task.payload.variation for task in environment.tasks(s)] for s in ("train", "validation", "test")]
    assert [len(split) for split in splits] == [150, 75, 75]
    assert sorted(number for split in splits for number in split) == list(range(300))
    both = ScienceWorld(names=["find-plant", "boil"], variations=2).tasks("test")
    assert [task.id.rpartition("-")[0] for task in both] == ["find-plant", "boil", "find-plant", "boil"]


def test_the_expert_goes_on_after_a_detour(world) -> None:
    steps = asyncio.run(by_the_expert(world, world.tasks("train")[0], before=("look around", "dance")))
    assert [step.info["valid"] for step in steps[:2]] == [1.0, 0.0]
    assert steps[1].observation == simulator.UNKNOWN_ACTION
    assert steps[-1].info["success"]


def test_a_wrong_focus_ends_the_episode_below_0(world) -> None:
    async def run():
        episode = open_episode(world)
        await episode.reset(world.tasks("train")[0])
        return await episode.step("focus on agent")

    step = asyncio.run(run())
    assert step.terminated
    assert not step.info["success"]
    assert step.info["score"] == -1.0


def test_a_state_is_the_same_played_on_and_played_again() -> None:
    key = simulator.VariationKey(SHORT[0], 3, "easy")
    gold = simulator.gold_path(key)
    first = [simulator.state_after(key, gold[:n]) for n in range(len(gold) + 1)]
    simulator.state_after.cache_clear()
    simulator.close()
    assert [simulator.state_after(key, gold[:n]) for n in range(len(gold), -1, -1)] == first[::-1]


def test_its_jvm_is_its_own_and_is_closed(world) -> None:
    world.tasks("train")
    assert any("scienceworld" in jar for jars in jvm._running for jar in jars)
    world.close()
    assert not any("scienceworld" in jar for jars in jvm._running for jar in jars)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"names": ["boill"]}, "names has boill, ScienceWorld's tasks are: boil, "),
        ({"simplifications": "easier"}, "simplifications has 'easier', ScienceWorld's are: easy, noElectricalAction"),
        ({"variations": 0}, "variations is 0"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"reward": "dense"}, "reward is 'dense'"),
        ({"invalid_penalty": -1.0}, "invalid_penalty is -1.0"),
    ],
)
def test_settings_that_cannot_work_are_named(settings, sentence) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        ScienceWorld(**settings).tasks("train")
