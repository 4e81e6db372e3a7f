"""A run that can be killed at a chosen moment, and resumed."""

from __future__ import annotations

import io
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import DoublePrecision
from scenarios import LLAMA, flat

from conftest import TINY, agent
from doubles import Countdown, ScriptedEngine
from sorl_lightning import checkpoints, ranks
from sorl_lightning.callbacks import BestCheckpoint, ClippingTriggeredNormalization
from sorl_lightning.checkpoints import AtomicCheckpointIO
from sorl_lightning.critic import Critic
from sorl_lightning.datamodule import Evaluation, RolloutDataModule
from sorl_lightning.objectives import PolicyGradient
from sorl_lightning.strategies import FSDP2

INSTALL = checkpoints.install


@dataclass(frozen=True)
class Death:
    """Where SIGKILL strikes: a place, the number of the collection, and the rank."""

    place: str
    collection: int
    rank: int = 0


class Fate(L.Callback):
    """Strikes at ``death``, and remembers what was trained, as a callback of the run remembers."""

    def __init__(self, death: Death | None) -> None:
        self.death = death
        self.trained: list[tuple[int, int, str, int]] = []
        self.collection = -1
        self.calls = 0

    def strike(self, place: str, after: int = 1) -> None:
        """Die at the ``after``-th time that this place is reached."""
        death = self.death
        if death is None or (death.place, death.collection) != (place, self.collection):
            return
        self.calls += 1
        if self.calls == after and int(os.environ.get("RANK", 0)) == death.rank:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.collection = trainer.current_epoch
        self.strike("collection")

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.strike("validation")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        collection = trainer.datamodule.collection
        own = [(collection.index, t.group, t.task.id, t.sibling) for t in collection.trajectories]
        self.trained += [trajectory for share in ranks.gather(own) for trajectory in share]

    def state_dict(self) -> dict[str, Any]:
        return {"trained": list(self.trained)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.trained = state_dict["trained"]


class MortalIO(AtomicCheckpointIO):
    """Dies with half a file written."""

    def __init__(self, fate: Fate) -> None:
        self.fate = fate

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        if self.fate.death is not None and self.fate.death.place == "writing":
            content = io.BytesIO()
            torch.save(checkpoint, content)
            target = checkpoints.unfinished(Path(path))
            target.write_bytes(content.getvalue()[: content.tell() // 2])
            self.fate.strike("writing", after=2)  # of the two files of a collection, the one that is resumed from
        super().save_checkpoint(checkpoint, path, storage_options)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What may differ from life to life, or between two runs.

    Args:
        epochs: collections.
        mini_batches: optimiser steps a pass.
        micro_batches: of an optimiser step.
        strategy: None is one process.
        critic: SO-PPO with it, else SO-GRPO.
        scripted: tokens do not depend on the weights, and numbers are float64: lives that add in another order
            still train the same trajectories. Without the normalization, which DDP has not.
        max_staleness: collections.
    """

    epochs: int = 10
    mini_batches: int = 2
    micro_batches: int = 2
    strategy: str | None = None
    critic: Critic | None = None
    scripted: bool = False
    max_staleness: int = 0

    def built(self) -> Any:
        """The trainer's strategy."""
        kinds = {None: "auto", "ddp": "ddp"}
        folders = self.strategy == "fsdp2 folders"
        return kinds[self.strategy] if self.strategy in kinds else FSDP2(save_distributed_checkpoint=folders)


ONE, PAIR = Shape(), Shape(strategy="fsdp2")


def live(folder: str, death: Death | None = None, processes: int = 1, shape: Shape = ONE) -> dict[str, Any]:
    """Train, from the last checkpoint if there is one."""
    fate = Fate(death)

    class MortalAdamW(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            fate.strike("optimiser", after=2)
            return loss

    def install(source: Path, target: Path) -> None:
        fate.strike("naming", after=2)  # a whole checkpoint that has not got its name
        INSTALL(source, target)

    checkpoints.install = install
    data = RolloutDataModule(
        Countdown((3, 1, 4, 2, 2, 3, 1), lambda task, attempt, text="": fate.strike("rollout", after=5)),
        ScriptedEngine() if shape.scripted else None, tasks_per_collection=4, group_size=2, max_turns=4, max_tokens=4,
        context_limit=128, mini_batches=shape.mini_batches, passes=2, micro_batches=shape.micro_batches,
        max_staleness=shape.max_staleness, validation=Evaluation(n=1),
    )  # fmt: skip
    module = agent(
        policy=LLAMA if shape.scripted else TINY, critic=shape.critic,
        objective=PolicyGradient(advantage="grpo" if shape.critic is None else "gae"),
        optimizer=lambda parameters: MortalAdamW(parameters, lr=1e-2),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97),
    )  # fmt: skip
    best = BestCheckpoint(dirpath=folder, monitor="val/return")
    last = ModelCheckpoint(folder, "{epoch}", save_last=True, save_on_train_epoch_end=True, monitor="collection",
                           mode="max", save_top_k=2, enable_version_counter=False)  # fmt: skip
    trainer = L.Trainer(
        accelerator="cpu", devices=processes, strategy=shape.built(), max_epochs=shape.epochs, logger=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, check_val_every_n_epoch=2,
        plugins=[MortalIO(fate), *([DoublePrecision()] if shape.scripted else [])],
        callbacks=[*([] if shape.scripted else [ClippingTriggeredNormalization(rule="relative")]), fate, best, last],
        accumulate_grad_batches=data.micro_batches, gradient_clip_val=1.0, use_distributed_sampler=False,
    )  # fmt: skip
    path = Path(folder) / "last.ckpt"
    resumed = path if checkpoints.is_there(path) else None
    trainer.fit(module, datamodule=data, ckpt_path=resumed, weights_only=False)
    return {"parameters": flat(module), "trained": fate.trained, "version": module.policy_version,
            "files": sorted(p.name for p in Path(folder).iterdir() if not p.name.startswith(".")),
            "left": sorted(p.name for p in Path(folder).iterdir() if p.name.startswith("."))}  # fmt: skip
