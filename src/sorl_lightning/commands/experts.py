"""``sorl experts``: what each world's expert achieves on held-out tasks, and the world's steps a second."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from jsonargparse import auto_cli

from sorl_lightning.commands.listing import show
from sorl_lightning.errors import ConfigurationError, RolloutError
from sorl_lightning.rollout.arena import Arena
from sorl_lightning.rollout.environment import Environment
from sorl_lightning.rollout.expert_play import ExpertEpisode, play_expert
from sorl_lightning.shipped import shipped

# Each world by the shipped config whose environment and turn limit are played.
WORLDS = {
    "textworld": "quickstart",
    "search": "search_expert",
    "alfworld": "alfworld_so_grpo",
    "webshop": "webshop_so_grpo",
    "scienceworld": "scienceworld_so_grpo",
    "medical": "medical_so_grpo",
}
# What makes the data of a world that ships without.
DATA = {"alfworld": "sorl data alfworld data/alfworld", "medical": "sorl data hpo data/hpo"}
Row = dict[str, Any]


def experts(
    tasks: int = 50,
    worlds: list[str] | None = None,
    split: Literal["train", "validation", "test"] = "validation",
    output: str | None = None,
) -> None:
    """Play held-out tasks by each world's expert and print success, turns and steps a second.

    A world whose extra or data are missing says so and is passed over.

    Args:
        tasks: the first so many of the split, or all where it has fewer.
        worlds: some of textworld, search, alfworld, webshop, scienceworld, medical, such as '[search,webshop]'; null
            takes all.
        split: of the tasks.
        output: JSON file for the figures; None writes none.
    """
    if tasks < 1:
        raise ConfigurationError(f"tasks must be at least 1, got {tasks}")
    chosen = list(WORLDS) if worlds is None else worlds
    unknown = [name for name in chosen if name not in WORLDS]
    if unknown:
        raise ConfigurationError(f"worlds: there is no {', '.join(unknown)}; it can be some of {', '.join(WORLDS)}")
    rows = []
    for name in chosen:
        rows.append(figures_of(name, tasks, split))
        print(f"sorl: {name}: {sentence(rows[-1])}", flush=True)
    columns = ("WORLD", "config", "tasks", "solved", "turns", "turn limit", "steps/s", "steps/cpu s", "resets/s", "")
    show(f"experts on the {split} split", columns, map(cells, rows))
    if output is not None:
        machine = {"processor": platform.processor() or platform.machine(), "python": platform.python_version()}
        Path(output).write_text(json.dumps({"split": split, "machine": machine, "worlds": rows}, indent=1) + "\n")


def figures_of(name: str, tasks: int, split: str) -> Row:
    """Figures of a world, or why there are none under "missing"."""
    data = yaml.safe_load(shipped("configs")[WORLDS[name]].read_text())["data"]
    row: Row = {"world": name, "config": f"sorl:{WORLDS[name]}", "turn_limit": data["max_turns"]}
    words = [json.dumps(data["environment"])]
    environment: Environment = auto_cli(itself, args=words, allow_abbrev=False, exit_on_error=False)
    try:
        with Arena(environment) as arena:
            chosen = environment.tasks(split)[:tasks]
            episodes = [arena.run(play_expert(environment, task, data["max_turns"])) for task in chosen]
    except (ConfigurationError, RolloutError) as error:
        return {**row, "missing": str(error) + (f"; its data: {DATA[name]}" if name in DATA else "")}
    return {**row, **summed(episodes)}


def itself(environment: Environment) -> Environment:
    """The environment that jsonargparse has built of a config's words."""
    return environment


def summed(episodes: Sequence[ExpertEpisode]) -> Row:
    """Figures of some episodes; seconds are wall-clock, or this process's on the processor."""
    turns = sum(episode.turns for episode in episodes)
    return {
        "tasks": len(episodes),
        "solved": sum(episode.success for episode in episodes),
        "turns_mean": turns / len(episodes),
        "turns_most": max(episode.turns for episode in episodes),
        "steps_per_second": turns / sum(episode.step_seconds for episode in episodes),
        "steps_per_processor_second": turns / sum(episode.step_processor_seconds for episode in episodes),
        "resets_per_second": len(episodes) / sum(episode.reset_seconds for episode in episodes),
    }


def sentence(row: Row) -> str:
    """A world's figures in words."""
    return row.get("missing") or f"{row['solved']} of {row['tasks']} tasks solved"


def cells(row: Row) -> tuple[str, ...]:
    """A world's line of the table."""
    if "missing" in row:
        return row["world"], row["config"], "", "", "", str(row["turn_limit"]), "", "", "", row["missing"]
    return (
        row["world"],
        row["config"],
        str(row["tasks"]),
        f"{row['solved'] / row['tasks']:.1%}",
        f"{row['turns_mean']:.1f}",
        str(row["turn_limit"]),
        rounded(row["steps_per_second"]),
        rounded(row["steps_per_processor_second"]),
        rounded(row["resets_per_second"]),
        "",
    )


def rounded(number: float) -> str:
    """Two digits or more."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"
