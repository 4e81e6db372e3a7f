"""Clipping-triggered normalization of the policy gradient."""

from __future__ import annotations

import statistics
from typing import Literal

import lightning as L
import torch
from typing_extensions import override

from sorl_lightning.callbacks.clip_bias import ClippedUpdate
from sorl_lightning.callbacks.clipping_meter import ClippingMeter
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.functional.losses import FactorRule, clip_factor
from sorl_lightning.types import LossTerms


class ClippingTriggeredNormalization(ClippingMeter):
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

    prefix = "normalization"

    def __init__(
        self,
        rule: FactorRule = "relative",
        tolerance: float = 1.0,
        window: int = 100,
        norm: Literal["exact", "surrogate"] = "exact",
        level: Literal["batch", "trajectory"] = "batch",
    ) -> None:
        super().__init__(rule, tolerance, window, norm)
        self.level = level

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if self.level == "trajectory" and trainer.world_size > 1:
            raise ConfigurationError(
                "ClippingTriggeredNormalization.level='trajectory' goes backward as often as a rank has clipped "
                f"trajectories, which {trainer.world_size} processes do not agree on: use level='batch'"
            )

    @override
    def _measure(self, update: ClippedUpdate, terms: LossTerms) -> None:
        if self.level == "batch":
            super()._measure(update, terms)
            return
        # Add what makes each trajectory's gradient its own factor times what the loss's backward pass will add.
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
    def _apply(self, update: ClippedUpdate, bias_norm: float) -> float:
        if self.level == "trajectory":
            return statistics.fmean(update.factors) if update.factors else 1.0
        factor = super()._apply(update, bias_norm)
        update.scale(factor)
        return factor
