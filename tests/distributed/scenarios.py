"""What the processes of a distributed test do. Results are plain numbers and arrays, so that they travel."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.plugins import DoublePrecision

from conftest import TINY, agent
from doubles import Countdown, ScriptedEngine
from sorl_lightning.callbacks import ClippingTriggeredNormalization
from sorl_lightning.datamodule import RolloutDataModule
from sorl_lightning.models import Loaded, SmallLlama
from sorl_lightning.objectives import PolicyGradient
from sorl_lightning.sharding import full_weights, whole
from sorl_lightning.strategies import FSDP2

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


LLAMA = DoubleLlama(**{**dataclasses.asdict(TINY), "num_hidden_layers": 2})


class Recorder(L.Callback):
    """Whole gradients, and figures, of each update."""

    def __init__(self) -> None:
        self.gradients: list[np.ndarray] = []
        self.figures: list[dict[str, float]] = []
        self.parameters: list[np.ndarray] = []
        self.tokens: list[int] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        whole_ones = [whole(p.grad).flatten() for p in pl_module.parameters()]
        self.gradients.append(torch.cat(whole_ones).numpy().copy())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.tokens.append(int(batch.generated.sum()))
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.figures.append({name: float(value) for name, value in trainer.callback_metrics.items()})
            self.parameters.append(flat(pl_module))


class Norms(ClippingTriggeredNormalization):
    """Keeps ||C|| of each update as the float64 that it was."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.seen: list[float] = []

    def _apply(self, update: Any, bias_norm: float) -> float:
        self.seen.append(bias_norm)
        return super()._apply(update, bias_norm)


def flat(module: Any) -> np.ndarray:
    return torch.cat([weight.flatten() for _, weight in full_weights(module.policy_model)]).numpy().copy()


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
        "norms": [] if meter is None else meter.seen, "tokens": recorder.tokens, "tasks": tasks,
        "version": module.policy_version,
    }  # fmt: skip


def sharded(ranks: int, **settings: Any) -> dict[str, Any]:
    plan = settings.pop("plan", {})
    return fit(strategy=FSDP2(**plan), devices=ranks, **settings)


def run(kind: str, ranks: int, settings: dict[str, Any]) -> dict[str, Any]:
    return sharded(ranks, **settings) if kind == "fsdp2" else fit(strategy=kind, devices=ranks, **settings)
