"""Clipping-triggered normalization of the policy gradient."""

from __future__ import annotations

import math
import statistics
import warnings
from collections import deque
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from typing_extensions import override

from sorl_lightning import ranks
from sorl_lightning.control import HasClipBias, owner_of
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.functional.losses import FactorRule, clip_factor
from sorl_lightning.sharding import gradient_norm

Gradients = list[Tensor | None]


class ClippingTriggeredNormalization(Callback):
    """Divide the policy gradient by the norm of its clipping bias whenever a ratio was clipped.

    A second backward pass, for micro-batches with a clipped token only, collects the clipping bias C beside the
    gradient. Before the optimiser steps, the policy's part of the gradient is multiplied by a factor that depends on
    ||C||; gradients of KL, entropy and value terms keep their size. Norm clipping comes after.

    Args:
        rule: "relative": 1 / max(1, ||C|| / (tolerance * m)), m the usual norm of the policy gradient, so that it acts
            on models of any size. "max1": 1 / max(1, ||C||). "literal": 1 / ||C||, which amplifies below 1. "plus1":
            1 / (1 + ||C||).
        tolerance: tau of the rule "relative", above 0.
        window: updates without clipping whose median gradient norm is "usual".

    Source: Li et al. 2025, arXiv:2511.20718, as reconstructed in docs/papers/sorl.md; "relative" is this project's.
    """

    def __init__(self, rule: FactorRule = "relative", tolerance: float = 1.0, window: int = 100) -> None:
        if not tolerance > 0:
            raise ConfigurationError(f"ClippingTriggeredNormalization.tolerance must be above 0, got {tolerance}")
        if window < 1:
            raise ConfigurationError(f"ClippingTriggeredNormalization.window must be at least 1, got {window}")
        self.rule = rule
        self.tolerance = tolerance
        self.window = window
        self.norms: deque[float] = deque(maxlen=window)
        self.collections = 0
        self.triggered = 0
        self.updates = 0
        self._bias: Gradients | None = None
        self._others: Gradients | None = None

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit" and isinstance(trainer.strategy, DDPStrategy):
            raise ConfigurationError(
                "ClippingTriggeredNormalization needs gradients that are averaged in every backward pass, which "
                "trainer.strategy ddp does once: use FSDP2, --config sorl:strategy/fsdp2"
            )
        if stage == "fit" and trainer.precision == "16-mixed":
            raise ConfigurationError(
                "ClippingTriggeredNormalization needs gradients that no loss scaler has touched: use trainer.precision "
                "bf16-mixed or 32-true, not 16-mixed"
            )

    @override
    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        terms = owner_of(HasClipBias, pl_module).loss_terms  # type: ignore[type-abstract]
        if terms is None:
            return
        if terms.clip_bias is not None and terms.clipped is not None and ranks.anywhere(bool(terms.clipped.any())):
            self._bias = _added(self._bias, _gradients_of(terms.clip_bias, pl_module))
        others = [term for term in (terms.regularizer, terms.value) if term is not None]
        if others:
            self._others = _added(self._others, _gradients_of(sum(others[1:], others[0]), pl_module))

    @override
    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        parameters = list(pl_module.parameters())
        others = self._others or [None] * len(parameters)
        policy_norm = _norm([_less(p.grad, other) for p, other in zip(parameters, others, strict=True)])
        bias_norm = _norm(self._bias) if self._bias is not None else 0.0
        factor = clip_factor(bias_norm, self.rule, self._reference_norm())
        if factor != 1.0:
            for parameter, other in zip(parameters, others, strict=True):
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
                    if other is not None:
                        parameter.grad.add_(other, alpha=1 - factor)
        elif self._bias is None and 0 < policy_norm < math.inf:
            self.norms.append(policy_norm)
        self.updates += 1
        self.triggered += self._bias is not None
        self._bias = self._others = None
        figures = {"policy_norm": policy_norm, "bias_norm": bias_norm, "factor": factor}
        figures["triggered"] = self.triggered / self.updates
        pl_module.log_dict({f"normalization/{name}": value for name, value in figures.items()})

    def _reference_norm(self) -> float | None:
        return self.tolerance * statistics.median(self.norms) if self.norms else None

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.collections += 1
        if self.collections == 3 and self.rule == "relative" and not self.norms:
            warnings.warn(
                "ClippingTriggeredNormalization(rule='relative') has seen no update without clipping in 3 collections, "
                "so it knows no usual gradient norm and does nothing: either every gradient was 0 "
                "(rollout/constant_groups is 1), or the rollout engine is not in step with the trainer "
                "(train/ratio of first updates is not 1)",
                stacklevel=1,
            )

    @override
    def state_dict(self) -> dict[str, Any]:
        counters = {name: getattr(self, name) for name in ("collections", "triggered", "updates")}
        return {"norms": list(self.norms), **counters}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.norms = deque(state_dict["norms"], maxlen=self.window)
        for name in ("collections", "triggered", "updates"):
            setattr(self, name, state_dict[name])


def _gradients_of(term: Tensor, module: torch.nn.Module) -> Gradients:
    """Gradient of ``term`` for each parameter; the graph and the parameters' own gradients stay as they were."""
    if not term.requires_grad:
        return [None] * len(list(module.parameters()))
    parameters = list(module.parameters())
    kept = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    (term * ranks.count()).backward(retain_graph=True)  # sharded passes average over ranks; terms are shares of a sum
    gradients = [parameter.grad for parameter in parameters]
    for parameter, gradient in zip(parameters, kept, strict=True):
        parameter.grad = gradient
    return gradients


def _added(total: Gradients | None, gradients: Gradients) -> Gradients:
    if total is None:
        return gradients
    pairs = zip(total, gradients, strict=True)
    return [new if old is None else old if new is None else old.add_(new) for old, new in pairs]


def _less(gradient: Tensor | None, other: Tensor | None) -> Tensor | None:
    return gradient if gradient is None or other is None else gradient - other


def _norm(gradients: Gradients) -> float:
    """Global L2 norm; norms of micro-batches do not add, so this is taken of the accumulated vector."""
    return float(gradient_norm(gradient for gradient in gradients if gradient is not None))
