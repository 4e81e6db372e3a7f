"""A small real run whose parts are timed, for the costs and the check of ``benchmarks/scaling_check.py``.

    python -m benchmarks.small_run --policy runs/quickstart_imitation/policy --max-staleness 0 --output staleness0.json

Environment, model and objective of the quickstart, with fewer tasks; LocalEngine and trainer share this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from itertools import zip_longest
from pathlib import Path
from typing import Any

import lightning as L
import torch

from sorl_lightning.callbacks import ClippingTriggeredNormalization
from sorl_lightning.datamodule import RolloutDataModule
from sorl_lightning.models import Pretrained
from sorl_lightning.module import AgentModule
from sorl_lightning.objectives import PolicyGradient
from sorl_lightning.rollout.collection import Collection
from sorl_lightning.rollout.engines import LocalEngine
from sorl_lightning.rollout.environments import TextWorldExpress


class Timed(LocalEngine):
    """Notes how long the last load of weights took, seconds."""

    loading = 0.0

    def load_weights(self, weights: Any, version: int) -> None:
        start = time.perf_counter()
        super().load_weights(weights, version)
        self.loading = time.perf_counter() - start


class Clock(L.Callback):
    """Notes of each collection how long it and its parts took, and how long its turns were."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        wall, cpu = time.perf_counter(), time.process_time()
        self.records.append(
            {
                "collection": data.collection.index,
                "seconds": wall - self._wall,
                "cpu_seconds": cpu - self._cpu,
                "collecting": data.collection.seconds,
                "waited": None if data.collection.stream is None else data.collection.stream.waited,
                "loading": data.engine.loading,
                "turns": [[len(t.completion.token_ids) for t in tr.turns] for tr in data.collection.trajectories],
                "rounds": rounds(data.collection),
                "load_average": os.getloadavg()[0],
            }
        )
        self._wall, self._cpu = wall, cpu


def rounds(collection: Collection) -> list[dict[str, float]]:
    """Of each round of turns, if all trajectories began together: requests, tokens of the longest, mean seconds."""
    columns = [[t for t in column if t] for column in zip_longest(*(t.turns for t in collection.trajectories))]
    return [
        {
            "requests": len(column),
            "longest": max(len(turn.completion.token_ids) for turn in column),
            "seconds": sum(turn.seconds for turn in column) / len(column),
        }
        for column in columns
    ]


def play(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The run's collections."""
    L.seed_everything(options.seed, verbose=False)
    module = AgentModule(
        Pretrained(path=options.policy),
        PolicyGradient(ratio="turn", advantage="grpo"),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0),
    )
    data = RolloutDataModule(
        TextWorldExpress(game="simonsays", split_by="seed", train_tasks=2000, validation_tasks=2),
        Timed(),
        tasks_per_collection=options.tasks,
        max_turns=6,
        max_tokens=16,
        mini_batches=2,
        max_staleness=options.max_staleness,
        seed=options.seed,
    )
    clock = Clock()
    L.Trainer(
        callbacks=[ClippingTriggeredNormalization(rule="max1"), clock],
        max_epochs=options.collections,
        accelerator="cpu",
        devices=1,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    ).fit(module, datamodule=data)
    return clock.records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", required=True, help="folder of the quickstart's warm start")
    parser.add_argument("--max-staleness", type=int, default=0)
    parser.add_argument("--collections", type=int, default=13)
    parser.add_argument("--tasks", type=int, default=8, help="of a collection, 8 siblings each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    records = play(options)
    about = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
    }
    settings = {k: v for k, v in vars(options).items() if k not in ("output", "policy")}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    content = {"settings": settings, "about": about, "cpu_seconds": time.process_time(), "collections": records}
    options.output.write_text(json.dumps(content) + "\n")
    for record in records:
        print(" ".join(f"{name} {value:.3f}" for name, value in record.items() if isinstance(value, (int, float))))


if __name__ == "__main__":
    main()
