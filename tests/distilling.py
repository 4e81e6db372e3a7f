"""A tiny student and teacher for tests of distillation, and what a fit shows of them."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch

from conftest import agent
from doubles import Countdown, ScriptedEngine
from sorl_lightning.datamodule import RolloutDataModule
from sorl_lightning.models import SmallLlama
from sorl_lightning.module import AgentModule
from sorl_lightning.objectives import Distillation, PolicyGradient
from sorl_lightning.teachers import LocalTeacher

TEACHER = SmallLlama(tokenizer="sorl:textworld", hidden_size=64, num_hidden_layers=1, context_length=256, seed=3)
FULL = ("reverse_kl", "forward_kl", "jsd")
RECORDED = ("topk_reverse_kl", "topk_reverse_kl_tail", "topk_forward_kl_tail", "k1", "k2", "k3")


class Knowing(Countdown):
    """A countdown whose expert knows a word."""

    def expert_action(self) -> str:
        return "take coin"


def student(divergence: str = "reverse_kl", teacher: Any = TEACHER, **settings: Any) -> AgentModule:
    """A student whose loss is not corrected for the made-up log-probabilities of a scripted engine."""
    own = {"ratio_clip": None, **settings.pop("distillation", {})}
    objective = Distillation(divergence=divergence, **own)  # type: ignore[arg-type]
    return agent(objective=objective, teacher=LocalTeacher(teacher), **settings)


def rewarded(**settings: Any) -> AgentModule:
    return student(distillation={"reward": PolicyGradient()}, **settings)


def rollouts(environment: Any = None, engine: Any = None, **settings: Any) -> RolloutDataModule:
    defaults = {"tasks_per_collection": 3, "group_size": 4, "max_turns": 4, "max_tokens": 4, "context_limit": 128}
    return RolloutDataModule(environment or Countdown(), engine or ScriptedEngine(), **{**defaults, **settings})


class Watch(L.Callback):
    """Keeps batches, gradients and figures."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.gradients: list[torch.Tensor] = []
        self.figures: list[dict[str, float]] = []
        self.statistics: list[Any] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append(batch)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.gradients.append(torch.cat([p.grad.flatten().clone() for p in pl_module.parameters()]))

    def on_train_epoch_end(self, trainer, pl_module):
        self.figures.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        self.statistics.append(pl_module.turn_statistics)


def flat(module: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def watched(fit: Any, module: AgentModule, data: RolloutDataModule, *callbacks: Any, **settings: Any) -> Watch:
    watch = Watch()
    fit(module, data, precision="64-true", callbacks=[*callbacks, watch], **settings)
    return watch
