"""Clipping-triggered normalization of the policy gradient."""

from __future__ import annotations

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
from sorl_lightning.callbacks.gradients import policy_parameters
from sorl_lightning.control import HasClipBias, owner_of
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.functional.losses import FactorRule, clip_factor
from sorl_lightning.types import LossTerms, RolloutBatch


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
        norm: "exact", of the gradient; "surrogate", without a second backward pass: the L2 norm of the token vector
            {weight * ratio * advantage} times the number of tokens (and "usual" is then in the same unit).
        level: "batch": one factor an update. "trajectory": one for each trajectory, from its own C as though it were
            the whole batch; with norm "exact" this takes a backward pass for each trajectory with a clipped token.

    Source: Li et al. 2025, arXiv:2511.20718, as reconstructed in docs/papers/sorl.md; "relative", "surrogate" and
    "trajectory" are this project's.
    """

    def __init__(
        self,
        rule: FactorRule = "relative",
        tolerance: float = 1.0,
        window: int = 100,
        norm: Literal["exact", "surrogate"] = "exact",
        level: Literal["batch", "trajectory"] = "batch",
    ) -> None:
        if not tolerance > 0:
            raise ConfigurationError(f"ClippingTriggeredNormalization.tolerance must be above 0, got {tolerance}")
        if window < 1:
            raise ConfigurationError(f"ClippingTriggeredNormalization.window must be at least 1, got {window}")
        self.rule = rule
        self.tolerance = tolerance
        self.window = window
        self.norm = norm
        self.level = level
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
            self._update = ClippedUpdate(policy_parameters(pl_module), exact=self.norm == "exact")
        if self.level == "batch":
            self._update.add(terms)
        else:
            self._scale_trajectories(self._update, terms)

    def _scale_trajectories(self, update: ClippedUpdate, terms: LossTerms) -> None:
        """Add what makes each trajectory's gradient its own factor times what the loss's backward pass will add."""
        assert self._batch is not None
        assert terms.policy_by_token is not None
        scale = torch.ones_like(terms.policy_by_token)
        for mask, size in update.add_by_trajectory(terms, self._batch):
            factor = clip_factor(size, self.rule, self._reference_norm())
            scale[mask] = factor
            update.factors.append(factor)
        if bool((scale != 1).any()):
            ((scale - 1) * terms.policy_by_token).sum().backward(retain_graph=True)

    @override
    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        update, self._update = self._update, None
        if update is None:  # the policy does not train now
            return
        bias_norm, policy_norm = update.bias_norm(), update.policy_norm()
        if self.level == "trajectory":
            factor = statistics.fmean(update.factors) if update.factors else 1.0
        else:
            factor = clip_factor(bias_norm, self.rule, self._reference_norm())
            update.scale(factor)
        if not update.triggered and policy_norm > 0:
            self.norms.append(policy_norm if self.norm == "exact" else update.surrogate_norm())
        self.updates += 1
        self.triggered += update.triggered
        figures = {"policy_norm": policy_norm, "bias_norm": bias_norm, "factor": factor}
        figures["triggered"] = self.triggered / self.updates
        pl_module.log_dict({f"normalization/{name}": value for name, value in figures.items()})

    def _reference_norm(self) -> float | None:
        return self.tolerance * statistics.median(self.norms) if self.norms else None

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.collections += self.updates > 0
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
