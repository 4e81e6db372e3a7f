"""ALFWorld: the real package, on games that are made here in the layout of its users' data."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from sorl_lightning import cli
from sorl_lightning.commands.data import alfworld as make_games
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.contract import check_environment
from sorl_lightning.rollout.environment import open_episode
from sorl_lightning.rollout.environments import AlfWorld
from sorl_lightning.rollout.environments import alfworld_simulator as simulator
from sorl_lightning.rollout.environments.alfworld_games import TASK_TYPES, games_of

pytest.importorskip("alfworld", reason="its extra compiles a planner for minutes: make test-worlds installs it")
# Warnings of the package's own dependencies, which it pins.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("alfworld"))
    cli.main(["data", "alfworld", folder, "--train", "6", "--validation", "2", "--test", "1"])
    return folder


async def by_the_expert(environment, task, before=()):
    episode, steps = open_episode(environment), []
    await episode.reset(task)
    for action in before:
        steps.append(await episode.step(action))
    while not steps or not (steps[-1].terminated or steps[-1].truncated):
        steps.append(await episode.step(episode.expert_action()))
    return steps


def test_the_contract_and_the_command_line_is_left_alone(data) -> None:
    arguments = list(sys.argv)
    variables = dict(os.environ)
    check_environment(AlfWorld(data), split="test", episodes=1, max_steps=3)
    assert sys.argv == arguments
    assert dict(os.environ) == variables


def test_the_planner_solves_each_of_the_six_types(data) -> None:
    environment = AlfWorld(data)
    tasks = environment.tasks("train")
    assert [task.id.split("/")[1].split("-")[0] for task in tasks] == list(TASK_TYPES)
    for task in tasks:
        steps = asyncio.run(by_the_expert(environment, task))
        assert steps[-1].info == {"success": True, "valid": 1.0, "valid_fraction": 1.0, "score": 1.0}
        assert [step.reward for step in steps] == [0.0] * (len(steps) - 1) + [1.0]


def test_the_planner_goes_on_after_a_detour(data) -> None:
    environment = AlfWorld(data)
    task = environment.tasks("train")[0]
    somewhere = simulator.state_after(simulator.GameKey(task.payload, False), ()).admissible[0]
    steps = asyncio.run(by_the_expert(environment, task, before=("dance", somewhere.upper())))
    assert [step.info["valid"] for step in steps[:2]] == [0.0, 1.0]
    assert steps[0].observation == "Nothing happens."
    assert steps[-1].info["success"]


def test_the_handcoded_expert_searches(data) -> None:
    environment = AlfWorld(data, expert="handcoded", task_types=TASK_TYPES[:1])
    (task,) = environment.tasks("train")
    steps = asyncio.run(by_the_expert(environment, task))
    assert steps[-1].info["success"]
    assert all(step.info["valid"] for step in steps)


def test_the_same_seed_makes_the_same_games_and_unseen_rooms_are_unseen(data, tmp_path) -> None:
    cli.main(["data", "alfworld", str(tmp_path), "--train", "6", "--validation", "2", "--test", "1"])
    rooms = {}
    for split in ("train", "validation", "test"):
        one, other = (games_of(Path(folder), split, TASK_TYPES) for folder in (data, str(tmp_path)))
        assert [game.name for game in one] == [game.name for game in other]
        assert [Path(game.path).read_text() for game in one] == [Path(game.path).read_text() for game in other]
        rooms[split] = {game.name.split("/")[0].split("-")[-1] for game in one}
    assert not rooms["test"] & (rooms["train"] | rooms["validation"])
    with pytest.raises(ConfigurationError, match="is there already"):
        make_games(str(tmp_path))


def game(folder: Path, name="pick_and_place_simple-Mug-None-Desk-301", trajectory=None, content=None) -> None:
    place = folder / "json_2.1.1/train" / name / "trial_0"
    place.mkdir(parents=True)
    if trajectory is not None:
        (place / "traj_data.json").write_text(json.dumps(trajectory))
    whole = {"pddl_domain": "", "grammar": "", "pddl_problem": "", "solvable": True}
    (place / "game.tw-pddl").write_text(json.dumps(whole if content is None else content))


TYPED = {"task_type": "pick_and_place_simple"}


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (None, r"json_2.1.1/train is not a folder; download the games with alfworld-download, or make some: sorl data"),
        ({}, r"there is no file .*traj_data.json"),
        ({"trajectory": {}}, r"traj_data.json has no task_type"),
        ({"trajectory": []}, r"traj_data.json has no task_type"),
        ({"trajectory": TYPED, "content": {"grammar": ""}}, r"game.tw-pddl has no pddl_domain, pddl_problem"),
        ({"trajectory": TYPED, "content": {"pddl_domain": "", "grammar": "", "pddl_problem": ""}}, r"no solvable game"),
        ({"trajectory": {"task_type": "juggle"}}, r"no solvable game"),
        ({"name": "movable_recep-Mug-Pan-Desk-301", "trajectory": TYPED}, r"no solvable game"),
    ],
)
def test_bad_data_are_named_in_one_sentence(tmp_path, files, sentence) -> None:
    if files is not None:
        game(tmp_path, **files)
    with pytest.raises(ConfigurationError, match=sentence):
        AlfWorld(str(tmp_path)).tasks("train")


def test_settings_that_cannot_work_are_named() -> None:
    with pytest.raises(ConfigurationError, match="task_types has juggle, ALFWorld's are: pick_and_place_simple"):
        AlfWorld(task_types=["juggle"])
    with pytest.raises(ConfigurationError, match="expert is 'human'"):
        AlfWorld(expert="human")


def test_the_folder_is_taken_from_the_variable(data, monkeypatch) -> None:
    monkeypatch.setenv("ALFWORLD_DATA", data)
    assert len(AlfWorld(max_tasks=4).tasks("train")) == 4
