"""Two worlds in one run: tasks by weight, figures by world."""

from __future__ import annotations

import asyncio
from collections import Counter

import lightning as L
import pytest

from conftest import agent
from doubles import Countdown, ScriptedEngine
from sorl_lightning.datamodule import RolloutDataModule
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.contract import check_environment
from sorl_lightning.rollout.environment import HasAdmissibleActions, HasExpert, Step, open_episode
from sorl_lightning.rollout.environments import Member, Mixture
from sorl_lightning.types import Message, Task


class Echo:
    """Repeat the task's word; one turn. Awaits, and has an expert."""

    def __init__(self, tasks=2):
        self.count = tasks
        self.closed = 0

    def tasks(self, split):
        return [Task(id=f"{split}-{n}", prompt=(Message(role="system", content="Echo."),)) for n in range(self.count)]

    async def reset(self, task):
        self.word, self.over = task.id, False
        return [Message(role="user", content=self.word)]

    async def step(self, text):
        reward = float(text == self.word and not self.over)
        self.over = True
        return Step("", reward, True, info={"success": text == self.word, "length": len(text)})

    def expert_action(self):
        return self.word

    async def close(self):
        self.closed += 1


def mixture(weights=(1.0, 1.0), echo=None, turns=(1, 2, 3, 4)):
    return Mixture(
        [
            Member(name="count", environment=Countdown(turns), weight=weights[0]),
            Member(name="echo", environment=echo or Echo(), weight=weights[1]),
        ]
    )


@pytest.mark.parametrize(
    ("weights", "counts"), [((1, 1), (4, 4)), ((3, 1), (6, 2)), ((1, 3), (4, 12)), ((0.5, 0.25), (4, 2))]
)
def test_training_tasks_come_in_proportion_to_the_weights(weights, counts) -> None:
    tasks = mixture(weights).tasks("train")
    names = Counter(task.id.partition("/")[0] for task in tasks)
    assert (names["count"], names["echo"]) == counts
    assert len({task.id for task in tasks}) == len(tasks)
    assert {task.payload[1].id for task in tasks} == {"train-0", "train-1", "train-2", "train-3"}


def test_held_out_tasks_come_once_each() -> None:
    assert [task.id for task in mixture((1, 9)).tasks("test")] == [
        "count/test-0", "echo/test-0", "count/test-1", "echo/test-1", "count/test-2",
    ]  # fmt: skip


def test_the_contract_holds_and_an_episode_offers_what_its_member_offers() -> None:
    world = mixture()
    check_environment(Mixture([Member(name="few", environment=Echo()), Member(name="more", environment=Echo(3))]))
    offers = {}
    for task in world.tasks("test"):
        episode = open_episode(world)
        asyncio.run(episode.reset(task))
        offers[task.payload[0]] = (isinstance(episode, HasExpert), isinstance(episode, HasAdmissibleActions))
    assert offers == {"count": (False, False), "echo": (True, False)}
    assert not isinstance(world, HasExpert)


def test_figures_of_each_world_in_one_run(fit) -> None:
    echo = Echo()
    data = RolloutDataModule(mixture(echo=echo), ScriptedEngine(), tasks_per_collection=8, group_size=2, max_turns=4,
                             max_tokens=4, context_limit=128)  # fmt: skip
    seen = {}

    class Watch(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            seen.update({name: float(value) for name, value in trainer.callback_metrics.items()})

    fit(agent(), data, callbacks=[Watch()])
    trajectories = data.collection.trajectories
    own = {name: [t for t in trajectories if t.task.id.startswith(name)] for name in ("count", "echo")}
    assert [len(group) for group in own.values()] == [8, 8]
    for name, group in own.items():
        for figure, values in {
            "success": [t.success for t in group],
            "return": [t.reward for t in group],
            "turns": [len(t.turns) for t in group],
            "length": [len(t.turns[-1].text) for t in group],
        }.items():
            assert seen[f"rollout/environment/{name}/{figure}"] == pytest.approx(sum(values) / len(values)), figure
    assert seen["rollout/environment/count/turns"] == 2.5
    assert seen["rollout/environment/echo/turns"] == 1
    assert echo.closed == 1


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: Mixture([]), "names that differ"),
        (lambda: Mixture([Member(name="a", environment=Echo())] * 2), "names that differ, got"),
        (lambda: Mixture([Member(name="a/b", environment=Echo())]), "letters, digits, _ and - only, got 'a/b'"),
        (lambda: mixture((1, 0)), "'echo' needs a weight above 0, got 0"),
        (lambda: mixture((1, 1e7)), "more than 1000000; bring the weights closer"),
        (lambda: mixture(echo=Echo(0)), "member 'echo' has no tasks in its 'train' split"),
    ],
)
def test_mixtures_that_cannot_work(build, sentence) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        build().tasks("train")
