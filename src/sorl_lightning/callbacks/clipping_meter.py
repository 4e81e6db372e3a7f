"""What clipping takes from each update's gradient, measured."""

from __future__ import annotations

import math
import statistics
import warnings
from collections import deque
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from typing_extensions import override

from sorl_lightning.callbacks.clip_bias import ClippedUpdate, check_trainer
from sorl_lightning.callbacks.gradients import bystanders, policy_parameters
from sorl_lightning.control import HasClipBias, owner_of
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.functional.losses import FactorRule, clip_factor
from sorl_lightning.types import LossTerms, RolloutBatch


class ClippingMeter(Callback):
    """Measures each update's clipping bias and logs what a factor made of it would be; acts on nothing.

    Args:
        rule: how the factor follows from ||C||.
        tolerance: tau of the rule "relative", above 0.
        window: updates without clipping whose median gradient norm is "usual".
        norm: "exact", of the gradient, or "surrogate", of the token vector.
    """

    prefix = "clipping"

    def __init__(
        self,
        rule: FactorRule = "relative",
        tolerance: float = 1.0,
        window: int = 100,
        norm: Literal["exact", "surrogate"] = "exact",
    ) -> None:
        if not tolerance > 0:
            raise ConfigurationError(f"{type(self).__name__}.tolerance must be above 0, got {tolerance}")
        if window < 1:
            raise ConfigurationError(f"{type(self).__name__}.window must be at least 1, got {window}")
        self.rule = rule
        self.tolerance = tolerance
        self.window = window
        self.norm = norm
        self.norms: deque[float] = deque(maxlen=window)
        self.collections = 0
        self.triggered = 0
        self.updates = 0
        self._update: ClippedUpdate | None = None
        self._batch: RolloutBatch | None = None

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            check_trainer(trainer, type(self).__name__)

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: RolloutBatch, batch_idx: int
    ) -> None:
        self._batch = batch

    @override
    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        terms = owner_of(HasClipBias, pl_module).loss_terms  # type: ignore[type-abstract]
        if terms is None:
            return
        if self._update is None:
            exact = self.norm == "exact"
            self._update = ClippedUpdate(policy_parameters(pl_module), bystanders(pl_module), exact)
        self._measure(self._update, terms)

    def _measure(self, update: ClippedUpdate, terms: LossTerms) -> None:
        update.add(terms)

    def _apply(self, update: ClippedUpdate, bias_norm: float) -> float:
        """The factor of this update."""
        return clip_factor(bias_norm, self.rule, self._reference_norm())

    @override
    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        update, self._update = self._update, None
        if update is None:  # the policy does not train now
            return
        bias_norm, policy_norm = update.bias_norm(), update.policy_norm()
        factor = self._apply(update, bias_norm)
        if not update.triggered and 0 < policy_norm < math.inf:
            self.norms.append(policy_norm if self.norm == "exact" else update.surrogate_norm())
        self.updates += 1
        self.triggered += update.triggered
        figures = {"policy_norm": policy_norm, "bias_norm": bias_norm, "factor": factor}
        figures["triggered"] = self.triggered / self.updates
        pl_module.log_dict({f"{self.prefix}/{name}": value for name, value in figures.items()})

    def _reference_norm(self) -> float | None:
        return self.tolerance * statistics.median(self.norms) if self.norms else None

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.collections += self.updates > 0
        if self.collections == 3 and self.rule == "relative" and not self.norms:
            warnings.warn(
                f"{type(self).__name__}(rule='relative') has seen no update without clipping in 3 collections, "
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
