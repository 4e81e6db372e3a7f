"""``sorl demo``: the quickstart from nothing to a table of what it was worth."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sorl_lightning.cli import run

QUIET = [f"--trainer.{option}=false" for option in ("logger", "enable_progress_bar", "enable_model_summary")]
WARM_START = "runs/quickstart_imitation/policy"
CURVES = ("rollout/success", "val/success", "rollout/turns", "train/clip_fraction", "normalization/factor")
# What a run is looked at with, as a reader of the README does: {root} is the folder of runs, {log} that of this one.
NEXT = {
    "curves": "tensorboard --logdir {root}",
    "one file": "sorl report {log}",
    "the model": "sorl export {log}/checkpoints/last.ckpt trained",
    "let it play": "sorl rollout trained --environment TextWorldExpress --environment.game simonsays "
    "--environment.split_by seed --max_turns 6",
}
ENGINES = "sorl_lightning.rollout.engines"


@dataclass(frozen=True)
class Row:
    """One line of the table: success on held-out tasks, as shares of 1."""

    policy: str
    success: float
    valid: float
    turns: float
    episodes: int


def demo(
    seed: int = 0, folder: str = "runs/demo", learning_rate: float | None = None, collections: int | None = None
) -> None:
    """Train the quickstart with clipping-triggered normalization, and compare it on held-out tasks.

    Writes ``demo.json`` with every figure of the table.

    Args:
        seed: of task order, sampling and mini-batches.
        folder: where runs and figures go.
        learning_rate: instead of the config's; 0 is the control that must not learn.
        collections: instead of the config's.
    """
    place = Path(folder)
    rows = [
        measure("random admissible actions", ["--data.validation.engine", f"{ENGINES}.RandomEngine"]),
        measure("warm start (imitation)", []),
    ]
    changes = {"--model.optimizer.lr": learning_rate, "--trainer.max_epochs": collections}
    extra = [f"{option}={value}" for option, value in changes.items() if value is not None]
    print("sorl: SO-GRPO from the warm start", flush=True)
    start = time.perf_counter()
    root = str(place / "so_grpo")
    trained = run([
        "fit", "--config", "sorl:quickstart", "--config", "sorl:clipping_triggered_normalization", *extra,
        "--data.seed", str(seed), "--trainer.default_root_dir", root,
    ])  # fmt: skip
    seconds = time.perf_counter() - start
    assert trained.trainer.log_dir is not None
    log = Path(trained.trainer.log_dir)
    rows.append(measure("SO-GRPO from the warm start", ["--ckpt_path", str(log / "checkpoints" / "last.ckpt")]))
    rows.append(measure("imitation, as many minutes more", ["--ckpt_path", str(imitate(place, seconds))]))
    rows.append(measure("expert (gold paths)", ["--data.validation.engine", f"{ENGINES}.ExpertEngine"]))
    figures = {
        "seed": seed,
        "learning_rate": learning_rate,
        "fit_seconds": seconds,
        "rows": [asdict(row) for row in rows],
        "curves": {name: curve(log, name) for name in CURVES},
    }
    (place / "demo.json").write_text(json.dumps(figures, indent=1))
    show(rows, seconds, root, log)


def measure(name: str, arguments: list[str]) -> Row:
    """Success of a policy on the quickstart's test split."""
    print(f"sorl: measuring on held-out tasks: {name}", flush=True)
    logging.disable(logging.INFO)  # what Lightning says of seeds and devices, five times
    try:
        cli = run(["test", "--config", "sorl:quickstart", *QUIET, "--verbose", "false", *arguments])
    finally:
        logging.disable(logging.NOTSET)
    figures = {key.removeprefix("test/"): float(value) for key, value in cli.trainer.callback_metrics.items()}
    return Row(
        policy=name,
        success=figures["success"],
        valid=figures["environment/valid_fraction"],
        turns=figures["turns"],
        episodes=int(figures["episodes"]),
    )


def curve(log: Path, name: str) -> list[tuple[int, float]]:
    """A figure of the run against collections, as TensorBoard shows it."""
    events = EventAccumulator(str(log / "by_collection"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def imitate(place: Path, seconds: float) -> Path:
    """Continue the warm start's imitation for ``seconds``; its last checkpoint."""
    limit = str(timedelta(seconds=int(seconds))).rjust(8, "0")
    folder = place / "imitation"
    print(f"sorl: imitation from the warm start, for as long: {seconds / 60:.1f} minutes", flush=True)
    run([
        "fit", "--config", "sorl:quickstart_imitation", *QUIET, "--trainer.limit_val_batches", "0",
        "--model.policy", "sorl_lightning.models.Pretrained", "--model.policy.path", WARM_START,
        "--hf_export.folder", "null", "--trainer.max_epochs", "100000", "--trainer.max_time", f"00:{limit}",
        "--checkpoint.dirpath", str(folder), "--checkpoint.enable_version_counter", "false",
    ])  # fmt: skip
    return folder / "last.ckpt"


def show(rows: list[Row], seconds: float, root: str, log: Path) -> None:
    """Print the table, and where to look next."""
    table = Table(title="simonsays, five turns: tasks of a seed range never trained on")
    for column in ("policy", "success", "± s.e.", "valid actions", "turns", "episodes"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for row in rows:
        error = (row.success * (1 - row.success) / row.episodes) ** 0.5
        figures = (f"{row.success:.1%}", f"{error:.1%}", f"{row.valid:.0%}", f"{row.turns:.1f}", str(row.episodes))
        table.add_row(row.policy, *figures)
    console = Console()
    console.print(table)
    console.print(f"Training took {seconds / 60:.1f} minutes.")
    # An environment that is not activated, as make demo's, has its programs beside its Python.
    place = "" if shutil.which("sorl") else f"{Path(sys.executable).parent}/"
    for what, command in NEXT.items():
        line = f"  {what:<12}{place}{command.format(root=root, log=log)}"
        console.print(line, soft_wrap=True, markup=False, highlight=False)
