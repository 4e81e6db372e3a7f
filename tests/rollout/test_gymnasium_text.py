"""Environments of Gymnasium's shape."""

from __future__ import annotations

import random

import pytest

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.contract import check_environment
from sorl_lightning.rollout.environment import open_episode
from sorl_lightning.rollout.environments import GymnasiumActions, GymnasiumText


class Stairs:
    """Climb to the seed's height; Gymnasium's five values."""

    def __init__(self, patience=6):
        self.patience = patience
        self.closed = 0

    def reset(self, seed=None, options=None):
        self.top, self.height, self.left = random.Random(seed).randint(1, 3), 0, self.patience
        return f"There are {self.top} stairs.", {}

    def step(self, action):
        self.height, self.left = self.height + (action in ("up", 1)), self.left - 1
        done = self.height >= self.top
        return f"{self.height} of {self.top}", float(done), done, self.left == 0, {"height": self.height, "name": "x"}

    def close(self):
        self.closed += 1


class OldStairs(Stairs):
    """The older gym's four values, and "won"."""

    def step(self, action):
        observation, reward, done, truncated, info = super().step(action)
        return observation, reward, done or truncated, info | {"won": reward > 0}


@pytest.mark.parametrize("make", [Stairs, OldStairs])
def test_the_contract(make) -> None:
    check_environment(GymnasiumText(make), actions=lambda episode, chance: chance.choice(["up", "stay"]))
    check_environment(GymnasiumActions(make, ["stay", "up"]))


def test_success_reward_limits_and_close() -> None:
    environment = GymnasiumText(Stairs, prompt="Climb. ")
    episode = open_episode(environment)
    assert episode.reset(environment.tasks("train")[0])[0]["content"].startswith("Climb. There are ")
    steps = [episode.step("up")]
    while not steps[-1].terminated:
        steps.append(episode.step("up"))
    assert steps[-1] == ("", 1.0, True, False, {"success": True, "height": float(episode._world.top)})
    assert episode._world.closed == 1
    assert episode.step("up").reward == 0.0
    episode.reset(environment.tasks("train")[0])
    steps = [episode.step("stay") for _ in range(6)]
    assert [step.truncated for step in steps] == [False] * 5 + [True]
    assert not steps[-1].info["success"]
    assert len({task.payload for split in ("train", "validation", "test") for task in environment.tasks(split)}) == 700


def test_names_become_numbers_and_other_texts_do_nothing() -> None:
    environment = GymnasiumActions(Stairs, ["stay", "up"])
    episode = open_episode(environment)
    episode.reset(environment.tasks("train")[0])
    step = episode.step("jump")
    assert step.observation == "Say one of: stay, up."
    assert step.info["valid"] == 0.0
    assert episode._world.left == 6
    assert episode.step(" up ").info == {"height": 1.0, "success": episode._world.top == 1, "valid": 1.0}


def test_settings_that_cannot_work_are_named() -> None:
    with pytest.raises(ConfigurationError, match="must be at least 1, got 0, 100 and 100"):
        GymnasiumText(Stairs, train_tasks=0)
    with pytest.raises(ConfigurationError, match="actions needs names that differ"):
        GymnasiumActions(Stairs, ["up", "up"])
