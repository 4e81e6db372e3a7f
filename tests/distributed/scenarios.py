"""What the processes of a distributed test do. Results are plain numbers and arrays, so that they travel."""

from __future__ import annotations

import dataclasses
import logging
import os
import warnings
import weakref
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins import DoublePrecision

from conftest import TINY, agent
from doubles import Countdown, ScriptedEngine, random_words
from sorl_lightning import ranks, student_teacher, teachers
from sorl_lightning.callbacks import ClippingTriggeredNormalization, TrajectoryLog
from sorl_lightning.checkpoints import AtomicCheckpointIO
from sorl_lightning.datamodule import RolloutDataModule
from sorl_lightning.lora import LoRA
from sorl_lightning.models import Loaded, SmallLlama
from sorl_lightning.objectives import PolicyGradient
from sorl_lightning.rollout.engines import LocalEngine
from sorl_lightning.sharding import decoder_layers, full_weights, gradient_norm, whole
from sorl_lightning.strategies import FSDP2
from sorl_lightning.trajectory_files import TrajectoryFiles

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoubleLlama(SmallLlama):
    """In float64, so that splits differ by rounding alone; ``tied`` or not."""

    tied: bool = True

    def load(self) -> Loaded:
        model, tokenizer = super().load()
        if not self.tied:
            model.config.tie_word_embeddings = False
            head = model.get_output_embeddings()
            head.weight = torch.nn.Parameter(head.weight.detach().flip(0).contiguous())
        return model.double(), tokenizer


class DoubleLoRA(LoRA):
    """Adapters in float64."""

    def load(self) -> Loaded:
        model, tokenizer = super().load()
        return model.double(), tokenizer


LLAMA = DoubleLlama(**{**dataclasses.asdict(TINY), "num_hidden_layers": 2})


class Recorder(L.Callback):
    """Whole gradients, and figures, of each update."""

    def __init__(self) -> None:
        self.gradients: list[np.ndarray] = []
        self.norms: list[float] = []
        self.figures: list[dict[str, float]] = []
        self.parameters: list[np.ndarray] = []
        self.tokens: list[int] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        gradients = [p.grad for p in pl_module.parameters() if p.requires_grad]
        self.norms.append(float(gradient_norm(gradients)))
        whole_ones = [whole(gradient).flatten() for gradient in gradients]
        self.gradients.append(torch.cat(whole_ones).numpy().copy())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.tokens.append(int(batch.generated.sum()))
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self._keep_figures(trainer)
            self.parameters.append(flat(pl_module))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._keep_figures(trainer)  # those of the last update, which the module logs after callbacks have looked

    def _keep_figures(self, trainer: Any) -> None:
        self.figures.append({name: float(value) for name, value in trainer.callback_metrics.items()})


class Norms(ClippingTriggeredNormalization):
    """Keeps ||C||, the norm of the policy's gradient and the factor of each update as the float64 that they were."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.seen: list[tuple[float, float, float]] = []

    def _apply(self, update: Any, bias_norm: float) -> float:
        policy_norm = update.policy_norm()
        factor = super()._apply(update, bias_norm)
        self.seen.append((bias_norm, policy_norm, factor))
        return factor


def flat(module: Any) -> np.ndarray:
    """All parameters that train, those of a critic last."""
    critic = [] if module.value_network is None else list(module.value_network.parameters())
    weights = [*(weight for _, weight in full_weights(module.policy_model)), *(whole(p.detach()) for p in critic)]
    return torch.cat([weight.flatten() for weight in weights]).numpy().copy()


def fit(
    strategy: Any = "auto",
    devices: int = 1,
    objective: Any = None,
    callbacks: Any = (),
    source: Any = LLAMA,
    environment: Any = None,
    engine: Any = None,
    optimizer: Any = None,
    module_settings: Any = None,
    trainer_settings: Any = None,
    switch: Any = None,
    **settings: Any,
) -> dict[str, Any]:
    """A fit in float64 on scripted rollouts; ``settings`` are the datamodule's, ``switch`` the normalization's."""
    recorder = Recorder()
    meter = None if switch is None else Norms(**switch)
    callbacks = [*callbacks, *([] if meter is None else [meter])]
    defaults: dict[str, Any] = {
        "tasks_per_collection": 4, "group_size": 4, "max_turns": 4, "max_tokens": 4, "context_limit": 128,
    }  # fmt: skip
    data = RolloutDataModule(
        environment or Countdown((3, 1, 4, 2)), engine or ScriptedEngine(), **{**defaults, **settings}
    )
    module = agent(
        policy=source, objective=objective or PolicyGradient(),
        optimizer=optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=3e-3)), **(module_settings or {}),
    )  # fmt: skip
    quiet: dict[str, Any] = {
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "num_sanity_val_steps": 0, "limit_val_batches": 0, "accelerator": "cpu", "max_epochs": 1,
        "use_distributed_sampler": False, "gradient_clip_val": 1.0,
    }  # fmt: skip
    trainer = L.Trainer(
        strategy=strategy, devices=devices, plugins=[DoublePrecision()], callbacks=[*callbacks, recorder],
        accumulate_grad_batches=data.micro_batches, **{**quiet, **(trainer_settings or {})},
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    tasks = [(t.task.id, t.group, t.sibling, t.seed) for t in data.collection.trajectories] if data.collection else []
    return {
        "gradients": recorder.gradients, "figures": recorder.figures, "parameters": recorder.parameters,
        "norms": recorder.norms, "switch": meter.seen if meter else [], "tokens": recorder.tokens, "tasks": tasks,
        "version": module.policy_version,
    }  # fmt: skip


def sharded(devices: int, **settings: Any) -> dict[str, Any]:
    plan = settings.pop("plan", {})
    return fit(strategy=FSDP2(**plan), devices=devices, **settings)


def run(kind: str, devices: int, settings: dict[str, Any]) -> dict[str, Any]:
    return sharded(devices, **settings) if kind == "fsdp2" else fit(strategy=kind, devices=devices, **settings)


def one_odd_trajectory(request: Any) -> tuple[list[int], list[float]]:
    """Log-probabilities close to those of a fresh policy, but for the first sibling of the first task."""
    ids, _ = random_words(request)
    odd = request.trajectory == (0, 0)
    return ids, [-9.0 if odd else -6.95] * len(ids)


def cuda_fit(kind: str | None, compute_dtype: Any) -> dict[str, Any]:
    """Two updates on one GPU in float32, sharded or not."""
    data = RolloutDataModule(
        Countdown((3, 1, 4, 2)), ScriptedEngine(), tasks_per_collection=4, group_size=4, max_turns=4, max_tokens=4,
        context_limit=128, passes=2,
    )  # fmt: skip
    module = agent()
    trainer = L.Trainer(
        strategy="auto" if kind is None else FSDP2(compute_dtype=compute_dtype), accelerator="gpu", devices=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, limit_val_batches=0, max_epochs=1, gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    parameters = torch.cat([weight.flatten() for _, weight in full_weights(module.policy_model)]).cpu()
    return {"parameters": parameters.numpy().copy(), "dtype": str(parameters.dtype)}


def logged(devices: int, folder: str) -> list[dict[str, Any]]:
    """The trajectory log of two ranks or one, less what the clock says; of every rank, what it finds on the disk."""
    logger = TensorBoardLogger(folder, name="", version="run")
    settings = {
        "passes": 2,
        "callbacks": [TrajectoryLog(1, 6)],
        "trainer_settings": {"logger": logger, "max_epochs": 2},
    }
    run("ddp" if devices > 1 else "auto", devices, settings)
    ranks.gather(None)  # until rank 0 has written
    lines = list(TrajectoryFiles(Path(folder) / "run/trajectories"))
    for turn in (turn for line in lines for turn in line["turns"]):
        del turn["seconds"]
    return lines


class Poison(PolicyGradient):
    """NaN in the second update, on rank 1 alone."""

    def terms(self, batch: Any, logprobs: Any, entropy: Any, weights: Any) -> Any:
        terms, metrics = super().terms(batch, logprobs, entropy, weights)
        object.__setattr__(self, "calls", getattr(self, "calls", 0) + 1)
        if self.calls == 2 and ranks.count() > 1 and torch.distributed.get_rank() == 1:
            terms = dataclasses.replace(terms, policy=terms.policy * float("nan"))
        return terms, metrics


def weights_alive(dtype: Any = None) -> dict[str, int]:
    """Fill an engine from shards, and count the whole tensors that live at once."""
    alive: list[Any] = []
    most = 0

    class Watch(LocalEngine):
        def load_weights(self, weights: Any, version: int) -> None:
            super().load_weights(counted(weights), version)

    def counted(weights: Any) -> Any:
        nonlocal most
        weights = iter(weights)
        while True:
            pair = next(weights, None)
            if pair is None:
                return
            name, weight = pair
            alive.append(weakref.ref(weight))
            most = max(most, sum(reference() is not None for reference in alive))
            del pair
            yield name, weight
            del weight

    fit(strategy=FSDP2(), devices=ranks.count() if torch.distributed.is_initialized() else 2, engine=Watch())
    return {"most": most, "tensors": len(alive)}


def all_fail_on_one_rank(everywhere: bool) -> dict[str, Any]:
    """Environments that fail for the tasks of rank 1 (positions 1 and 3), or of both."""

    def fails(task: Any, attempt: int, text: Any = None) -> None:
        if everywhere or int(os.environ["RANK"]) == 1:
            raise OSError("the world ended")

    return sharded(2, environment=Countdown((3, 1, 4, 2), fails), retries=0, passes=2)


def checkpoint_sizes(folder: str) -> dict[str, int]:
    """Bytes of a checkpoint of about 10M parameters with AdamW and a reference, and of what it must hold."""
    source = SmallLlama(tokenizer="sorl:textworld", hidden_size=384, num_hidden_layers=6, context_length=256)
    data = RolloutDataModule(
        Countdown((1, 1)), ScriptedEngine(), tasks_per_collection=2, group_size=2, max_turns=1, max_tokens=4,
        context_limit=128,
    )  # fmt: skip
    module = agent(
        policy=source, objective=PolicyGradient(kl_coefficient=0.1),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )  # fmt: skip
    saver = ModelCheckpoint(folder, save_last=True, save_on_train_epoch_end=True)
    L.Trainer(
        strategy=FSDP2(), accelerator="cpu", devices=2, logger=False, enable_progress_bar=False, num_sanity_val_steps=0,
        enable_model_summary=False, limit_val_batches=0, max_epochs=1, callbacks=[saver],
        plugins=[AtomicCheckpointIO()],
    ).fit(module, datamodule=data)  # fmt: skip
    count = sum(weight.numel() for _, weight in full_weights(module.policy_model))
    return {"parameters": count, "bytes": Path(folder, "last.ckpt").stat().st_size}


class ShardedTeacher(teachers.LocalTeacher):
    """Remembers the share of its decoder layers that this rank holds."""

    share = 1.0

    def shard(self, mesh: Any) -> None:
        super().shard(mesh)
        weights = [weight for layer in decoder_layers(self.model) for weight in layer.parameters()]
        self.share = sum(weight.to_local().numel() for weight in weights) / sum(weight.numel() for weight in weights)


def in_small_chunks(kind: str, devices: int, settings: dict[str, Any]) -> dict[str, Any]:
    """``run`` with a teacher that takes a row or two at a time, so not as often on every rank."""
    teachers.TOKENS_AT_ONCE = 64
    return {**run(kind, devices, settings), "share": settings["module_settings"]["teacher"].share}


def row_by_row(kind: str, devices: int, settings: dict[str, Any]) -> dict[str, Any]:
    """``run`` where held-out rows are scored one at a time, so not as often on every rank."""
    student_teacher.ROWS_AT_ONCE = 1
    return run(kind, devices, settings)
