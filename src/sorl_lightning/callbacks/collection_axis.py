"""A second TensorBoard run whose x-axis counts collections."""

from __future__ import annotations

from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.tensorboard import SummaryWriter
from typing_extensions import override


class CollectionAxis(Callback):
    """Write each collection's last figures a second time, against the number of the collection.

    Lightning's own x-axis is the optimiser step, which is the policy's version. TensorBoard shows this as a run
    "by_collection" inside the main one.
    """

    def __init__(self) -> None:
        self._validated = False

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._validated = True

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        figures = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if self._validated or not name.startswith("val/")  # else they are an earlier validation's
        }
        self._validated = False
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                with SummaryWriter(str(Path(logger.log_dir) / "by_collection")) as writer:
                    for name, value in figures.items():
                        writer.add_scalar(name, value, trainer.current_epoch)
