"""What the experts' table says, of worlds that count."""

from __future__ import annotations

import asyncio
import json
import re
import time

import pytest

from doubles import Countdown
from sorl_lightning.cli import main
from sorl_lightning.commands import experts
from sorl_lightning.errors import ConfigurationError, RolloutError
from sorl_lightning.rollout import environments as worlds
from sorl_lightning.rollout.expert_play import play_expert
from sorl_lightning.shipped import shipped


class Slow(Countdown):
    """Solved by an odd number of letters; a step takes 20 ms, a reset 10, and the expert's thinking 50."""

    def reset(self, task):
        time.sleep(0.01)
        return super().reset(task)

    async def step(self, text):
        await asyncio.sleep(0.02)
        return super().step(text)

    def expert_action(self):
        time.sleep(0.05)
        if self.left == 9:
            raise LookupError("nine are too many")
        return "odd"


def played(turns, max_turns):
    world = Slow([turns])
    return asyncio.run(play_expert(world, world.tasks("train")[0], max_turns))


def test_an_episode_counts_turns_and_the_worlds_own_time() -> None:
    episode = played(3, max_turns=5)
    assert (episode.success, episode.turns) == (True, 3)
    assert 0.06 <= episode.step_seconds < 0.15
    assert 0.01 <= episode.reset_seconds < 0.05
    assert 0 < episode.step_processor_seconds < 0.03  # it sleeps


def test_the_turn_limit_ends_it() -> None:
    assert played(3, max_turns=2).turns == 2


def test_an_expert_without_an_action_is_named_with_its_task() -> None:
    with pytest.raises(RolloutError, match="no action in task 'train-0': nine are too many"):
        played(9, max_turns=2)


def test_the_command_prints_and_writes_each_world_and_what_is_missing(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "220")
    main(["experts", "--tasks", "4", "--worlds", "[webshop,medical]", "--output", "experts.json"])
    printed = capsys.readouterr().out
    shop, medical = json.loads((tmp_path / "experts.json").read_text())["worlds"]
    assert (shop["tasks"], shop["solved"], shop["turn_limit"]) == (4, 4, 10)
    assert 3 <= shop["turns_mean"] <= shop["turns_most"] <= 10
    assert re.search(r"webshop +sorl:webshop_so_grpo +4 +100\.0%", printed)
    assert medical["missing"].endswith(
        "data/hpo/validation.jsonl cannot be read: No such file or directory; its data: sorl data hpo data/hpo"
    )
    assert medical["missing"] in printed


def test_extras_keep_their_brackets(monkeypatch, capsys) -> None:
    def missing(split):
        raise ConfigurationError("pip install 'sorl-lightning[webshop]'")

    monkeypatch.setenv("COLUMNS", "220")
    monkeypatch.setattr(worlds.WebShop, "tasks", lambda self, split: missing(split))
    experts.experts(worlds=["webshop"])
    assert capsys.readouterr().out.count("sorl-lightning[webshop]") == 2


def test_every_world_with_an_expert_and_tasks_of_its_own_is_in_the_table() -> None:
    text = "".join(shipped("configs")[name].read_text() for name in experts.WORLDS.values())
    named = set(re.findall(r"environments\.(\w+)", text))
    able = {name for name in worlds.__all__ if hasattr(getattr(worlds, name), "expert_action")}
    assert able - {"RecordedChats", "Mixture", "GeneratedShop", "ShopFiles", "ShopServer"} <= named


@pytest.mark.parametrize(
    ("settings", "message"), [({"tasks": 0}, "tasks must be at least 1"), ({"worlds": ["chess"]}, "there is no chess")]
)
def test_what_cannot_be_is_refused(settings, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        experts.experts(**settings)
