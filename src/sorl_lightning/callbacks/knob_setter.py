"""What callbacks that set a knob have in common."""

from __future__ import annotations

from typing import ClassVar

import lightning as L
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from sorl_lightning.errors import ConfigurationError


class KnobSetter(Callback):
    """Sets one knob, alone: two callbacks that set the same one are refused.

    Attributes:
        knob: its name, as in the table of knobs in docs/floor_plan.md.
        needs_end: whether its schedule runs over the whole fit, whose end must then be planned.
    """

    knob: ClassVar[str]
    needs_end: bool = False

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        name = type(self).__name__
        for other in trainer.callbacks:  # type: ignore[attr-defined]
            if other is not self and isinstance(other, KnobSetter) and other.knob == self.knob:
                raise ConfigurationError(
                    f"{name} and {type(other).__name__} both set {self.knob}: leave one of them out"
                )
        if self.needs_end and trainer.max_epochs == -1 and trainer.max_steps == -1:
            raise ConfigurationError(
                f"{name} is a schedule over the whole run, which has no planned end: set trainer.max_epochs or "
                f"trainer.max_steps instead of trainer.max_epochs={trainer.max_epochs}"
            )


def progress(trainer: L.Trainer) -> float:
    """Share of the planned optimiser steps that were taken, 0 at the first one."""
    return trainer.global_step / float(trainer.estimated_stepping_batches)
