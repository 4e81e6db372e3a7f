"""One run of the study: an arm and a seed, to a dictionary of raw figures."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from sorl_lightning.callbacks import TCODF2B, KLScheduleTransition, RolloutDepthController
from sorl_lightning.callbacks.turn_diagnosis import by_turn
from sorl_lightning.datamodule import Evaluation, RolloutDataModule
from sorl_lightning.functional.depth import is_probe
from sorl_lightning.models import Readout
from sorl_lightning.module import AgentModule
from sorl_lightning.objectives import Distillation
from sorl_lightning.teachers import LocalTeacher
from sorl_lightning.types import RolloutBatch
from studies.turnopd.world import LIMITS, QUIET, Coin

ARMS: dict[str, Callable[[], list[Callback]]] = {
    "vanilla": list,
    "depth": lambda: [RolloutDepthController()],
    "blend": lambda: [KLScheduleTransition()],
    "both": lambda: [RolloutDepthController(), KLScheduleTransition()],
    "hard": lambda: [KLScheduleTransition("hard")],
    "tcod_f2b": lambda: [TCODF2B()],
}
PHASES = ("rollout", "probe", "teacher", "update", "validation")


class TimedTeacher(LocalTeacher):
    """Counts the processor time of its forward passes."""

    cpu = 0.0

    def readout(self, batch: RolloutBatch) -> Readout:
        start = time.process_time()
        found = super().readout(batch)
        self.cpu += time.process_time() - start
        return found


class Ledger(Callback):
    """Writes down accuracy and time, phase by phase; seconds are those of this process's processor, and of the wall."""

    def __init__(self, teacher: TimedTeacher, controlled: bool) -> None:
        self.teacher = teacher
        self.controlled = controlled
        self.cpu = dict.fromkeys(PHASES, 0.0)
        self.wall = dict.fromkeys(PHASES, 0.0)
        self.evaluations: list[dict[str, float]] = []
        self.collections: list[dict[str, Any]] = []
        self._mark = (time.process_time(), time.perf_counter())

    def _lap(self, phase: str) -> None:
        now = (time.process_time(), time.perf_counter())
        self.cpu[phase] += now[0] - self._mark[0]
        self.wall[phase] += now[1] - self._mark[1]
        self._mark = now

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._mark = (time.process_time(), time.perf_counter())
        self._taught = self.teacher.cpu, self.teacher.seconds

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        probe = self.controlled and is_probe(trainer.current_epoch + 1)
        self._lap("update" if batch_idx else "probe" if probe else "rollout")

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._lap("update")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._lap("validation")
        success = float(trainer.callback_metrics["val/success"])
        cpu = {f"cpu_{name}": value for name, value in self.cpu.items()}
        self.evaluations.append({"collection": trainer.current_epoch + 1, "success": success, **cpu})

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._lap("update")
        for phases, spent in (
            (self.cpu, self.teacher.cpu - self._taught[0]),
            (self.wall, self.teacher.seconds - self._taught[1]),
        ):
            phases["teacher"] += spent
            phases["update"] -= spent
        collection = trainer.datamodule.collection  # type: ignore[attr-defined]
        figures = by_turn(pl_module.turn_statistics, pl_module.turn_profile)
        self.collections.append(
            {
                "turn_limit": collection.trajectories[0].turn_limit,
                "success": sum(t.success for t in collection.trajectories) / len(collection.trajectories),
                "turns": sum(len(t.turns) for t in collection.trajectories),
                **{name: figures[name] for name in ("divergence", "loss_share", "survivors", "failed_less_succeeded")},
            }
        )


def run(arm: str, seed: int, models: Path, collections: int, tasks: int) -> dict[str, Any]:
    """Distil the student once; everything that is drawn depends on ``seed``."""
    L.seed_everything(seed, verbose=False)
    teacher = TimedTeacher(str(models / "teacher"))
    module = AgentModule(
        str(models / "student"),
        Distillation(),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        teacher=teacher,
    )
    data = RolloutDataModule(
        Coin(tasks=tasks), tasks_per_collection=32, validation=Evaluation(n=1, temperature=0.85), seed=seed, **LIMITS
    )
    switches = ARMS[arm]()
    ledger = Ledger(teacher, any(isinstance(switch, RolloutDepthController) for switch in switches))
    every = max(1, collections // 15)
    trainer = L.Trainer(max_epochs=collections, check_val_every_n_epoch=every, callbacks=[*switches, ledger], **QUIET)
    trainer.fit(module, datamodule=data)
    return {
        "arm": arm, "seed": seed, "collections": collections, "evaluation_tasks": tasks, "cpu": ledger.cpu,
        "wall": ledger.wall, "evaluations": ledger.evaluations, "history": ledger.collections,
    }  # fmt: skip
