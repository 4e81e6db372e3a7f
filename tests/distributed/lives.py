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
from scenarios import flat

from conftest import TINY, agent
from doubles import Countdown
from sorl_lightning import checkpoints, ranks
from sorl_lightning.callbacks import BestCheckpoint, ClippingTriggeredNormalization
from sorl_lightning.checkpoints import AtomicCheckpointIO
from sorl_lightning.critic import Critic
from sorl_lightning.datamodule import Evaluation, RolloutDataModule
from sorl_lightning.objectives import PolicyGradient
from sorl_lightning.strategies import FSDP2


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
    """Dies with half a file written, or with a whole one that has not got its name."""

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


def live(folder: str, death: Death | None = None, processes: int = 1, sharded: bool = False, epochs: int = 10,
         micro_batches: int = 2, critic: Critic | None = None) -> dict[str, Any]:  # fmt: skip
    """Train 10 collections, from the last checkpoint if there is one; SO-PPO with ``critic``, else SO-GRPO."""
    fate = Fate(death)

    class MortalAdamW(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            fate.strike("optimiser", after=2)
            return loss

    data = RolloutDataModule(
        Countdown((3, 1, 4, 2, 2, 3, 1), lambda task, attempt, text="": fate.strike("rollout", after=5)),
        tasks_per_collection=4, group_size=2, max_turns=4, max_tokens=4, context_limit=128, mini_batches=2,
        passes=2, micro_batches=micro_batches, validation=Evaluation(n=1),
    )  # fmt: skip
    objective = PolicyGradient(advantage="grpo" if critic is None else "gae")
    module = agent(
        policy=TINY, objective=objective, critic=critic, optimizer=lambda parameters: MortalAdamW(parameters, lr=1e-2),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97),
    )  # fmt: skip
    best = BestCheckpoint(dirpath=folder, monitor="val/return")
    last = ModelCheckpoint(folder, "{epoch}", save_last=True, save_on_train_epoch_end=True, monitor="collection",
                           mode="max", save_top_k=2, enable_version_counter=False)  # fmt: skip
    trainer = L.Trainer(
        accelerator="cpu", devices=processes, strategy=FSDP2() if sharded else "auto", max_epochs=epochs, logger=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, check_val_every_n_epoch=2,
        plugins=[MortalIO(fate)], callbacks=[ClippingTriggeredNormalization(rule="relative"), fate, best, last],
        accumulate_grad_batches=data.micro_batches, gradient_clip_val=1.0, use_distributed_sampler=False,
    )  # fmt: skip
    path = Path(folder) / "last.ckpt"
    trainer.fit(module, datamodule=data, ckpt_path=path if path.exists() else None, weights_only=False)
    return {"parameters": flat(module), "trained": fate.trained, "version": module.policy_version,
            "best": sorted(p.name for p in Path(folder).iterdir())}  # fmt: skip
