"""One run of the study in a process of its own, and what is kept of it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from studies.stability.cells import Cell

HERE = Path(__file__).parent
BASE = HERE / "base.yaml"
# Figures of updates are averaged over each collection's; those of collections stand as they are.
UPDATES = {
    "clip_fraction": "train/clip_fraction",
    "clip_fraction_turns": "train/clip_fraction_turns",
    "grad_norm": "train/grad_norm",
    "entropy": "train/entropy",
    "policy_kl": "train/policy_kl",
    "advantage_variance": "train/advantage_variance",
    "ratio_max": "train/ratio_max",
}
NORMS = ("bias_norm", "factor", "triggered")
COLLECTIONS = {
    "success": "rollout/success",
    "turns": "rollout/turns",
    "constant_groups": "rollout/constant_groups",
    "explained_variance": "critic/explained_variance",
}


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large a run is."""

    collections: int
    options: tuple[str, ...] = ()


FULL = Size(collections=24)
QUICK = Size(collections=3, options=("--data.tasks_per_collection", "2", "--data.group_size", "4"))


def command(cell: Cell, seed: int, size: Size, folder: Path) -> list[str]:
    """The run as a command of ``sorl``."""
    return [
        "fit", "--config", "sorl:quickstart", "--config", str(BASE), *cell.arguments,
        *([] if cell.normalized else ["--config", "sorl:clipping_monitor"]), *size.options,
        "--data.seed", str(seed), "--seed_everything", str(seed),
        "--trainer.max_epochs", str(size.collections), "--trainer.default_root_dir", str(folder),
        "--checkpoint.every_n_epochs", str(size.collections), "--trajectory_log.every_n_collections", str(size.collections),
    ]  # fmt: skip


def run(cell: Cell, seed: int, size: Size, work: Path, result: Path) -> None:
    """Train, and write ``result``; a result that is there is left alone.

    Raises:
        RuntimeError: the run failed; its last lines are in the message.
    """
    if result.exists():
        return
    folder = work / f"{cell.name}-{seed}"
    arguments = command(cell, seed, size, folder)
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(
        [sys.executable, "-m", "sorl_lightning", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{cell.name}, seed {seed}: {(done.stdout + done.stderr)[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    (log,) = folder.glob("lightning_logs/version_*")
    record: dict[str, Any] = {
        "cell": cell.name,
        "seed": seed,
        "command": ["sorl", *(argument.replace(f"{HERE.parents[1]}/", "") for argument in arguments)],
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "curves": curves(log, cell, size.collections),
    }
    result.parent.mkdir(parents=True, exist_ok=True)
    partial = result.with_suffix(".partial")
    partial.write_text(json.dumps(record) + "\n")
    partial.rename(result)


def curves(log: Path, cell: Cell, collections: int) -> dict[str, list[float]]:
    """Figures of a run, one a collection."""
    events = EventAccumulator(str(log), size_guidance={"scalars": 0})
    events.Reload()
    tags = set(events.Tags()["scalars"])
    prefix = "normalization" if cell.normalized else "clipping"
    updates = UPDATES | {name: f"{prefix}/{name}" for name in NORMS}

    def values(tag: str) -> list[float]:
        return [round(event.value, 6) for event in events.Scalars(tag)]

    def means(tag: str) -> list[float]:
        series = values(tag)
        share = len(series) // collections
        return [round(sum(series[k * share : (k + 1) * share]) / share, 6) for k in range(collections)]

    kept = {name: values(tag) for name, tag in COLLECTIONS.items() if tag in tags}
    return kept | {name: means(tag) for name, tag in updates.items() if tag in tags}
