"""``sorl rollout MODEL --environment NAME``: let a model play, show what it says, and keep it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sorl_lightning.callbacks.token_records import TokenRecords, record_of
from sorl_lightning.callbacks.trajectory_log import turns_table
from sorl_lightning.commands.targets import absent
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.models import source_of
from sorl_lightning.rollout import environments  # noqa: F401  so that --environment takes their names alone
from sorl_lightning.rollout.arena import Arena
from sorl_lightning.rollout.chat import Chat
from sorl_lightning.rollout.collector import Collection, Collector, Sampling
from sorl_lightning.rollout.engine import RolloutEngine
from sorl_lightning.rollout.engines import LocalEngine
from sorl_lightning.rollout.environment import Environment
from sorl_lightning.rollout.token_limits import context_in_force
from sorl_lightning.trajectory_files import SCHEMA, TrajectoryFiles
from sorl_lightning.types import Task


def rollout(
    model: str,
    environment: Environment | None = None,
    output: str | None = None,
    split: Literal["train", "validation", "test"] = "validation",
    tasks: int = 4,
    n: int = 1,
    max_turns: int = 16,
    max_tokens: int = 256,
    temperature: float = 1.0,
    context_limit: int | None = None,
    seed: int = 0,
    engine: RolloutEngine | None = None,
) -> None:
    """Play tasks with a model and print its turns.

    Args:
        model: Hugging Face folder or Hub id.
        environment: the world, by its name in ``sorl envs`` or a class path; it must be given.
        output: folder for the trajectories, as JSON lines; docs/trajectory_log.md describes a line. Must not exist.
        split: of the tasks.
        tasks: the first so many.
        n: episodes a task.
        max_turns: most turns of an episode.
        max_tokens: most tokens of a turn.
        temperature: of sampling; 0 is greedy.
        context_limit: most tokens of an episode, prompt and observations included; None is what the model can take.
        seed: of sampling.
        engine: plays instead of the model, whose tokenizer is used: an expert, random actions.
    """
    if environment is None:
        raise ConfigurationError("environment: name one, as in --environment TextWorldExpress; sorl envs lists them")
    if output is not None:
        absent(output, "output")
    if min(tasks, n, max_turns, max_tokens) < 1 or not 0 <= temperature < float("inf"):
        raise ConfigurationError(
            "tasks, n, max_turns and max_tokens must be at least 1 and temperature 0 or more, got "
            f"{tasks}, {n}, {max_turns}, {max_tokens} and {temperature}"
        )
    chosen = environment.tasks(split)[:tasks]
    if not chosen:
        raise ConfigurationError(f"{type(environment).__name__} has no tasks in its {split!r} split")
    network, tokenizer = source_of(model).load()
    limit = context_in_force(network, context_limit, "context_limit")
    sampling = Sampling(max_tokens=max_tokens, context_limit=limit, temperature=temperature)
    collector = Collector(environment, engine or LocalEngine(), Chat(tokenizer), sampling, n)
    collection = play(collector, network, tokenizer, chosen, max_turns, seed)
    show(collection, tokenizer, output)


def play(
    collector: Collector,
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[Task],
    max_turns: int,
    seed: int,
) -> Collection:
    """Play ``tasks`` with the collector's engine, and give everything back."""
    network.to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type]
    with Arena(collector.environment) as arena:
        arena.attach(collector.engine, network, tokenizer)
        collector.engine.load_weights(network.named_parameters(), 0)
        return arena.run(collector.collect(tasks, max_turns, seed))


def show(collection: Collection, tokenizer: PreTrainedTokenizerBase, output: str | None) -> None:
    """Print turns and sums; write the lines."""
    head = {"schema": SCHEMA, "collection": 0, "policy_version": 0}
    lines = [{**head, **record_of(t, i, TokenRecords([]), tokenizer)} for i, t in enumerate(collection.trajectories)]
    Console(markup=False).print(turns_table(lines, 0))
    for failure in collection.failures:
        print(f"sorl: {failure}")
    count = len(lines)
    won, turns = sum(t.success for t in collection.trajectories), sum(len(t.turns) for t in collection.trajectories)
    print(f"sorl: {won} of {count} episodes succeeded, {turns / max(1, count):.1f} turns each")
    if output is not None:
        TrajectoryFiles(Path(output)).append(lines)
        print(f"sorl: wrote {count} trajectories to {output}")
