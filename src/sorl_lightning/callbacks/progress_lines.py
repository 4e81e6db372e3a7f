"""What a run says of itself where no progress bar can move: in a log file, a pipe, a batch job."""

from __future__ import annotations

import time

import lightning as L
from lightning.pytorch.callbacks import Callback
from typing_extensions import override


class ProgressLines(Callback):
    """Print a line a collection: the progress bar's figures that are new, and the seconds that it took.

    ``sorl`` adds it where the output is no terminal, unless ``trainer.enable_progress_bar`` is false.
    """

    def __init__(self) -> None:
        self._since = 0.0
        self._validated = False

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._validated = True

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._since = time.monotonic()

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        now = time.monotonic()
        if trainer.is_global_zero:
            known = trainer.progress_bar_metrics.items()  # Lightning keeps those of the last validation
            new = [(name, value) for name, value in known if self._validated or not name.startswith("val/")]
            figures = "".join(f", {name} {float(value):.3f}" for name, value in new)
            planned = "" if trainer.max_epochs in (None, -1) else f" of {trainer.max_epochs}"
            print(
                f"sorl: collection {trainer.current_epoch + 1}{planned}{figures}, {now - self._since:.1f} s",
                flush=True,
            )
        self._since, self._validated = now, False
