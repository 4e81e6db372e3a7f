"""From equal trajectories to equal turns."""

from __future__ import annotations

from typing import Any, Literal

import lightning as L
from typing_extensions import override

from sorl_lightning.callbacks.knob_setter import KnobSetter, progress
from sorl_lightning.control import HasKLSchedule, owner_of
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.functional.schedules import cosine_ramp, linear_ramp


class KLScheduleTransition(KnobSetter):
    """Raise ``kl_schedule.turn_blend`` from 0 to 1 with the share of planned optimiser steps taken.

    The value is a function of the step alone, so there is nothing to checkpoint.

    Args:
        shape: "linear"; "cosine", half a cosine; "hard", 1 from the first step on.
        start: progress in [0, 1) at which the transition begins; "hard" does not read it.
        end: progress in (start, 1] at which it is complete, likewise.

    Source: Zhou et al. 2026, arXiv:2607.05804, sec. 5.2; "cosine" is ours.
    """

    knob = "kl_schedule.turn_blend"

    def __init__(
        self, shape: Literal["linear", "cosine", "hard"] = "linear", start: float = 0.0, end: float = 1.0
    ) -> None:
        if not 0 <= start < end <= 1:
            raise ConfigurationError(f"KLScheduleTransition needs 0 <= start < end <= 1, got {start} and {end}")
        if shape not in ("linear", "cosine", "hard"):
            raise ConfigurationError(f"KLScheduleTransition.shape must be linear, cosine or hard, got {shape!r}")
        self.shape = shape
        self.start = start
        self.end = end
        self.needs_end = shape != "hard"

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        schedule = owner_of(HasKLSchedule, pl_module).kl_schedule  # type: ignore[type-abstract]
        if self.shape == "hard":
            schedule.turn_blend = 1.0
        else:
            ramp = linear_ramp if self.shape == "linear" else cosine_ramp
            schedule.turn_blend = ramp(progress(trainer), self.start, self.end)
