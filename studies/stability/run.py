"""One run of the study in a process of its own, and what is kept of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from studies.stability.cells import Cell
from studies.stability.regimes import Regime, Setting

ROOT = Path(__file__).parents[2]
QUICK = 3  # collections
QUICK_OPTIONS = ("--data.tasks_per_collection", "2", "--data.group_size", "4")
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
class Run:
    """One cell, regime, setting and seed.

    Attributes:
        quick: few and small collections.
        scouting: of a regime's grid, kept apart from the study's own.
    """

    cell: Cell
    regime: Regime
    setting: Setting
    seed: int
    quick: bool = False
    scouting: bool = False

    def __str__(self) -> str:
        folder, kind = ("scouting/", f"-{self.setting}") if self.scouting else ("", "")
        return f"{self.regime.name}/{folder}{self.cell.name}{kind}-{self.seed}"

    @property
    def collections(self) -> int:
        """How many there are."""
        full = self.regime.scouted_collections if self.scouting else self.regime.collections
        return self.cell.collections(self.regime, QUICK if self.quick else full)

    def command(self, folder: Path) -> list[str]:
        """The run as arguments of ``sorl``."""
        return [
            "fit", "--config", "sorl:quickstart", "--config", str(self.regime.base),
            *self.cell.arguments(self.setting), *(QUICK_OPTIONS if self.quick else ()),
            "--data.seed", str(self.seed), "--seed_everything", str(self.seed),
            "--trainer.max_epochs", str(self.collections), "--trainer.default_root_dir", str(folder),
            "--checkpoint.every_n_epochs", str(self.collections),
            "--trajectory_log.every_n_collections", str(self.collections),
        ]  # fmt: skip


def execute(run: Run, work: Path, results: Path) -> bool:
    """Train, and write the run's file under ``results``; whether it ran: a result that is there is left alone.

    Raises:
        RuntimeError: the run failed; its last lines are in the message.
    """
    result = results / f"{run}.json"
    if result.exists():
        return False
    folder = work / str(run)
    folder.mkdir(parents=True)
    arguments = run.command(folder)
    start = time.perf_counter()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "sorl_lightning", *arguments],
            stdout=output, stderr=subprocess.STDOUT, env=environment,
        )  # fmt: skip
        _, status, usage = os.wait4(process.pid, 0)  # this process's own time, whatever runs beside it
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{run} ended with {process.returncode}: {(folder / 'output.txt').read_text()[-2000:]}")
    (log,) = folder.glob("lightning_logs/version_*")
    record: dict[str, Any] = {
        "regime": run.regime.name,
        "cell": run.cell.name,
        "seed": run.seed,
        "learning_rate": run.setting.learning_rate * run.cell.step,
        "clip_range": None if run.cell.own_clip_range else run.setting.clip_range,
        "updates": run.cell.updates(run.regime),
        "command": ["sorl", *(argument.replace(f"{ROOT}/", "") for argument in arguments)],
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "curves": curves(log, run.cell, run.collections),
    }
    result.parent.mkdir(parents=True, exist_ok=True)
    partial = result.with_suffix(".partial")
    partial.write_text(json.dumps(record) + "\n")
    partial.rename(result)
    return True


def rounded(value: float) -> float:
    """To four significant digits."""
    return float(f"{value:.4g}")


def curves(log: Path, cell: Cell, collections: int) -> dict[str, list[float]]:
    """Figures of a run, one a collection."""
    events = EventAccumulator(str(log), size_guidance={"scalars": 0})
    events.Reload()
    tags = set(events.Tags()["scalars"])
    prefix = "normalization" if cell.normalized else "clipping"
    updates = UPDATES | {name: f"{prefix}/{name}" for name in NORMS}

    def values(tag: str) -> list[float]:
        return [event.value for event in events.Scalars(tag)]

    kept = {name: [rounded(value) for value in values(tag)] for name, tag in COLLECTIONS.items() if tag in tags}
    return kept | {name: means(values(tag), collections) for name, tag in updates.items() if tag in tags}


def means(values: list[float], collections: int) -> list[float]:
    """Mean over the updates of each collection."""
    share = len(values) // collections
    return [rounded(sum(values[k * share : (k + 1) * share]) / share) for k in range(collections)]
