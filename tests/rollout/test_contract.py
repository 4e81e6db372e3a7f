"""The contract test passes a sound environment, and names what is wrong with each broken one."""

from __future__ import annotations

import random

import pytest

from sorl_lightning.rollout.contract import ContractError, check_environment
from sorl_lightning.rollout.environment import Step
from sorl_lightning.types import Message, Task

GOAL = 3


class Counting:
    """Say "up" three times. Sound in every respect; the broken ones change one thing each."""

    def tasks(self, split):
        return [Task(id=f"{split}-{n}", payload=n) for n in range(3)]

    def reset(self, task):
        self.count = 0
        return [Message(role="user", content=f"Count to {GOAL} for task {task.payload}.")]

    def step(self, text):
        if self.count >= GOAL:
            return Step("", 0.0, True, info={"success": True})
        self.count += text == "up"
        done = self.count >= GOAL
        return Step("" if done else f"{self.count}", float(done), done, info={"success": done})

    def expert_action(self):
        return "up"

    def admissible_actions(self):
        return ["down", "up"]


class AsyncCounting(Counting):
    async def reset(self, task):
        return super().reset(task)

    async def step(self, text):
        return super().step(text)


class PlainTuples(Counting):
    def step(self, text):
        return tuple(super().step(text))


class WithoutExtras:
    """Only the three methods."""

    def __init__(self):
        self.world = Counting()

    def tasks(self, split):
        return self.world.tasks(split)

    def reset(self, task):
        self.world = Counting()
        return self.world.reset(task)

    def step(self, text):
        return self.world.step(text)


class Refusing(Counting):
    """An extra step after the end raises, which is allowed."""

    def step(self, text):
        if self.count >= GOAL:
            raise RuntimeError("the episode is over")
        return super().step(text)


@pytest.mark.parametrize("sound", [Counting, AsyncCounting, PlainTuples, WithoutExtras, Refusing])
def test_a_sound_environment_passes(sound):
    check_environment(sound())


class NoTasks(Counting):
    def tasks(self, split):
        return []


class TwinIds(Counting):
    def tasks(self, split):
        return [Task(id="same"), Task(id="same")]


class FreshIds(Counting):
    def tasks(self, split):
        return [Task(id=str(random.random()))]


class OverlappingSplits(Counting):
    def tasks(self, split):
        return [Task(id="shared")]


class BareReset(Counting):
    def reset(self, task):
        super().reset(task)
        return ["Count!"]


class FourTuple(Counting):
    def step(self, text):
        return tuple(super().step(text))[:4]


class NumberObservation(Counting):
    def step(self, text):
        return super().step(text)._replace(observation=3)


class EndlessReward(Counting):
    def step(self, text):
        return super().step(text)._replace(reward=float("inf"))


class IntegerFlag(Counting):
    def step(self, text):
        return super().step(text)._replace(terminated=1)


class SharedWorld(Counting):
    """All copies count on one list: each alone is right, together they are not."""

    def __init__(self):
        self.shared = [0]

    def reset(self, task):
        self.shared[0] = 0
        return super().reset(task)

    def step(self, text):
        self.count = self.shared[0]
        step = super().step(text)
        self.shared[0] = self.count
        return step


class LeftOver(Counting):
    """Forgets to start from zero."""

    def __init__(self):
        self.log = []

    def step(self, text):
        self.log.append(text)
        return super().step(text)._replace(info={"steps": len(self.log)})


class Chance(Counting):
    def step(self, text):
        return super().step(text)._replace(reward=random.random() * (self.count < GOAL))


class Fragile(Counting):
    def step(self, text):
        return super().step(text.split()[0])


class Surrogates(Counting):
    def step(self, text):
        text.encode()
        return super().step(text)


class GoesOn(Counting):
    def step(self, text):
        self.count += 1
        return Step(f"{self.count}", 1.0, self.count == GOAL)


class LostExpert(Counting):
    def expert_action(self):
        return "down"


class SilentExpert(Counting):
    def expert_action(self):
        raise LookupError("no idea")


class Unsorted(Counting):
    def admissible_actions(self):
        return ["up", "down"]


class RaisingReset(Counting):
    def reset(self, task):
        raise KeyError("payload")


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (NoTasks, "is empty"),
        (TwinIds, "two tasks with the id \\['same'\\]"),
        (FreshIds, "on a second call"),
        (OverlappingSplits, "share the task 'shared'"),
        (BareReset, "messages with a role"),
        (FourTuple, "a tuple of five"),
        (NumberObservation, "observation must be a string or messages"),
        (EndlessReward, "finite number"),
        (IntegerFlag, "must be bool"),
        (SharedWorld, "episodes share state"),
        (LeftOver, "with the same actions went differently at step 0"),
        (Chance, "went differently at step"),
        (Fragile, "an action must never raise"),
        (Surrogates, "an action must never raise"),
        (GoesOn, "a step after the end"),
        (LostExpert, "did not solve"),
        (SilentExpert, "gave up after 0 actions: no idea"),
        (Unsorted, "must be sorted"),
        (RaisingReset, "reset of 'train-0' raised"),
    ],
)
def test_a_broken_environment_is_named(broken, sentence):
    with pytest.raises(ContractError, match=sentence):
        check_environment(broken())


def test_chance_is_allowed_where_it_is_declared():
    check_environment(Chance(), deterministic=False)


def test_actions_can_be_chosen_by_the_user():
    said = []

    def always_up(environment, chance):
        said.append("up")
        return "up"

    check_environment(Counting(), episodes=1, actions=always_up)
    assert said == ["up"] * GOAL
