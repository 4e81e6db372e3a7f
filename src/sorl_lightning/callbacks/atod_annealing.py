"""From the teacher to rewards."""

from __future__ import annotations

from typing import Any

import lightning as L
from typing_extensions import override

from sorl_lightning.callbacks.knob_setter import KnobSetter, progress
from sorl_lightning.control import HasLossMix, LossMix, owner_of
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.functional.schedules import linear_ramp


class ATODAnnealing(KnobSetter):
    """Move the loss from distillation (factor 1 -> .1) to the policy gradient on rewards (1 -> 2), linearly.

    The objective is a Distillation with a ``reward``.

    Args:
        distillation: factor of the distillation loss at the end, 0 or more.
        reward: factor of the policy gradient at the end, 0 or more.
        end: progress in (0, 1] at which both are reached; the paper's 80 of 150 steps by default.

    Source: arXiv:2606.27814 (ATOD).
    """

    knob = "objective.mix"
    needs_end = True

    def __init__(self, distillation: float = 0.1, reward: float = 2.0, end: float = 80 / 150) -> None:
        if not (distillation >= 0 and reward >= 0 and 0 < end <= 1):
            raise ConfigurationError(
                f"ATODAnnealing needs factors of 0 or more and end in (0, 1], got {distillation}, {reward} and {end}"
            )
        self.distillation = distillation
        self.reward = reward
        self.end = end

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and getattr(pl_module.objective, "reward", None) is None:
            raise ConfigurationError("ATODAnnealing anneals to rewards: set objective.reward of a Distillation")

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        share = linear_ramp(progress(trainer), 0.0, self.end)
        mix: LossMix = owner_of(HasLossMix, pl_module.objective).mix  # type: ignore[type-abstract]
        mix.distillation = 1 + share * (self.distillation - 1)
        mix.reward = 1 + share * (self.reward - 1)
        pl_module.log_dict({"loss_mix/distillation": mix.distillation, "loss_mix/reward": mix.reward})
