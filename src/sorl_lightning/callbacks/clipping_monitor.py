"""The signs of an unstable run, without a hand on it."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor
from typing_extensions import override

from sorl_lightning.callbacks.clipping_meter import ClippingMeter
from sorl_lightning.callbacks.clipping_triggered_normalization import ClippingTriggeredNormalization
from sorl_lightning.control import HasRolloutBudget, HasTokenFigures, owner_of
from sorl_lightning.functional.collapse import is_collapsing
from sorl_lightning.functional.losses import FactorRule
from sorl_lightning.tally import Tally

FIGURES = {"ratio": "ratio", "clip_fraction": "clip_fraction", "entropy": "entropy", "policy_kl": "kl"}


class ClippingMonitor(ClippingMeter):
    """Log what ClippingTriggeredNormalization would see and do, and figures by turn; change nothing.

    By turn index, once a collection: ratio, clip fraction, entropy, KL from the collection's policy, and variance of
    the advantage. Warns when success has fallen below half of its best while more tokens are clipped. In a run with
    ClippingTriggeredNormalization, which logs the norms itself, it leaves them to it.

    Args:
        rule: of the factor that is logged; tolerance, window and norm: likewise as there.
        turns: the first so many turns are shown.
        patience: collections whose mean is compared for the warning.
    """

    def __init__(
        self,
        rule: FactorRule = "relative",
        tolerance: float = 1.0,
        window: int = 100,
        norm: Literal["exact", "surrogate"] = "exact",
        turns: int = 16,
        patience: int = 5,
    ) -> None:
        super().__init__(rule, tolerance, window, norm)
        self.turns = turns
        self.patience = patience
        self.success: list[float] = []
        self.clip_fraction: list[float] = []
        self._tally = Tally()
        self._measures = True
        self._depth = turns
        self._warned = False

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        others = trainer.callbacks  # type: ignore[attr-defined]
        budget = owner_of(HasRolloutBudget, trainer.datamodule).rollout_budget  # type: ignore[attr-defined, type-abstract]
        self._depth = min(self.turns, budget.ceiling)
        self._measures = not any(isinstance(other, ClippingTriggeredNormalization) for other in others)
        if self._measures:
            super().setup(trainer, pl_module, stage)

    @override
    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        figures = owner_of(HasTokenFigures, pl_module).token_figures  # type: ignore[type-abstract]
        assert self._batch is not None
        turn = self._batch.turn
        if "clip_fraction" in figures:
            self._tally.add_mean("clip_fraction", figures["clip_fraction"], turn >= 0)
        for index in range(self._depth):  # on every rank the same, reached or not
            mask = turn == index
            self._tally.add(f"tokens/{index}", mask.sum())
            for name, shown in FIGURES.items():
                if name in figures:
                    self._tally.add_mean(f"turns/{shown}/{index}", figures[name], mask)
            self._tally.add_mean(f"turns/advantage_variance/{index}", self._batch.advantages**2, mask)
            self._tally.add_mean(f"mean/{index}", self._batch.advantages, mask)
        if self._measures:
            super().on_before_backward(trainer, pl_module, loss)

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        figures = self._tally.flush()
        self.clip_fraction.append(float(figures.pop("clip_fraction", torch.zeros(()))))
        for index in range(self._depth):
            reached, mean = figures.pop(f"tokens/{index}", 0) > 0, figures.pop(f"mean/{index}", 0)
            if reached:
                figures[f"turns/advantage_variance/{index}"] -= mean**2
            else:
                figures = {name: value for name, value in figures.items() if not name.endswith(f"/{index}")}
        pl_module.log_dict(figures)
        self.success.append(float(trainer.callback_metrics.get("rollout/success", 0.0)))
        if not self._warned and is_collapsing(self.success, self.clip_fraction, self.patience):
            self._warned = True
            warnings.warn(self._sentence(trainer.current_epoch), stacklevel=1)
        if self._measures:
            super().on_train_epoch_end(trainer, pl_module)

    def _sentence(self, collection: int) -> str:
        recent = slice(-self.patience, None)
        success, clipped = (sum(values[recent]) / self.patience for values in (self.success, self.clip_fraction))
        return (
            f"the run looks like collapsing at collection {collection}: success fell from {max(self.success):.2f} at "
            f"best to {success:.2f} while {clipped:.0%} of the tokens are clipped; fewer updates a collection "
            "(data.mini_batches, data.passes), a smaller learning rate, objective.ratio='turn' or "
            "ClippingTriggeredNormalization may hold it"
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        history = {"success": self.success, "clip_fraction": self.clip_fraction, "warned": self._warned}
        return {**super().state_dict(), **history}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.success, self.clip_fraction = list(state_dict["success"]), list(state_dict["clip_fraction"])
        self._warned = state_dict["warned"]
