"""One run of the study: an arm and a seed, to a dictionary of raw figures."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn

from sorl_lightning.callbacks import TCODF2B, KLScheduleTransition, RolloutDepthController
from sorl_lightning.callbacks.turn_diagnosis import by_turn
from sorl_lightning.cli import ADVICE
from sorl_lightning.datamodule import Evaluation, RolloutDataModule
from sorl_lightning.functional.depth import is_probe
from sorl_lightning.module import AgentModule
from sorl_lightning.networks import Readout
from sorl_lightning.objectives import Distillation
from sorl_lightning.objectives.distillation import Divergence
from sorl_lightning.teachers import LocalTeacher
from sorl_lightning.types import RolloutBatch
from studies.turnopd.world import LIMITS, MODELS, QUIET, Coin

ARMS: dict[str, Callable[[], list[Callback]]] = {
    "vanilla": list,
    "depth": lambda: [RolloutDepthController()],
    "blend": lambda: [KLScheduleTransition()],
    "both": lambda: [RolloutDepthController(), KLScheduleTransition()],
    "hard": lambda: [KLScheduleTransition("hard")],
    "tcod_f2b": lambda: [TCODF2B()],
}
TRAJECTORIES = 32  # of a collection, which is one update
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
        if trainer.state.fn == TrainerFn.FITTING:
            self._lap("update")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn != TrainerFn.FITTING:  # before training
            return
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


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large a run is.

    Attributes:
        collections: of 32 trajectories, one update each.
        evaluations: how often it is measured, evenly spaced.
        tasks: of an evaluation.
    """

    collections: int
    evaluations: int
    tasks: int

    @property
    def arguments(self) -> list[str]:
        return [str(self.collections), str(self.evaluations), str(self.tasks)]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all arms of the study have in common."""

    student: Path = MODELS["student"]
    divergence: Divergence = "reverse_kl"
    learning_rate: float = 1e-3


def run(arm: str, seed: int, size: Size, setting: Setting = Setting()) -> dict[str, Any]:
    """Distil the student once; everything that is drawn depends on ``seed``."""
    L.seed_everything(seed, verbose=False)
    teacher = TimedTeacher(str(MODELS["teacher"]))
    module = AgentModule(
        str(setting.student),
        Distillation(divergence=setting.divergence),
        lambda parameters: torch.optim.AdamW(parameters, lr=setting.learning_rate, weight_decay=0.0),
        teacher=teacher,
    )
    validation = Evaluation(n=1, temperature=0.85)
    data = RolloutDataModule(
        Coin(tasks=size.tasks), tasks_per_collection=TRAJECTORIES, validation=validation, seed=seed, **LIMITS
    )
    switches = ARMS[arm]()
    ledger = Ledger(teacher, any(isinstance(switch, RolloutDepthController) for switch in switches))
    trainer = L.Trainer(
        max_epochs=size.collections, check_val_every_n_epoch=size.collections // size.evaluations,
        gradient_clip_val=1.0, callbacks=[*switches, ledger], **QUIET,
    )  # fmt: skip
    trainer.validate(module, datamodule=data, verbose=False)
    start = float(trainer.callback_metrics["val/success"])
    trainer.fit(module, datamodule=data)
    return {
        "arm": arm, "seed": seed, **vars(size), "start": start, "cpu": ledger.cpu, "wall": ledger.wall,
        "evaluations": ledger.evaluations, "history": ledger.collections,
    }  # fmt: skip


def keep(figures: dict[str, Any], result: Path) -> None:
    """Write a run's file, whole or not at all."""
    result.parent.mkdir(parents=True, exist_ok=True)
    partial = result.with_suffix(".partial")
    partial.write_text(json.dumps(figures) + "\n")
    partial.rename(result)


def main() -> None:
    """Run one arm and seed, and write its file when it is done."""
    arm, seed, result, *size = sys.argv[1:]
    for advice in ADVICE:
        warnings.filterwarnings("ignore", advice)
    names = ("collections", "evaluations", "tasks")
    figures = run(arm, int(seed), Size(**dict(zip(names, map(int, size), strict=True))))
    keep(figures, Path(result))
    cpu, wall = (sum(figures[clock].values()) for clock in ("cpu", "wall"))
    print(f"success {figures['evaluations'][-1]['success']:.2f}, {cpu:.0f} cpu s, {wall:.0f} s")


if __name__ == "__main__":
    main()
