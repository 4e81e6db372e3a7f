"""Keep the checkpoint that did best on held-out tasks."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override


class BestCheckpoint(ModelCheckpoint):
    """Save a checkpoint after each validation that was the best so far.

    Args:
        monitor: figure of the validation.
        mode: whether it should be large ("max") or small ("min").
        save_top_k: how many of the best to keep; 0 keeps none.
        dirpath: folder; None is that of the run.
        filename: name of the file.
    """

    def __init__(
        self,
        monitor: str = "val/success",
        mode: str = "max",
        save_top_k: int = 1,
        dirpath: str | None = None,
        filename: str = "best-{epoch:04d}",
    ) -> None:
        super().__init__(
            dirpath=dirpath,
            filename=filename,
            monitor=monitor,
            mode=mode,
            save_top_k=save_top_k,
            save_on_train_epoch_end=True,  # callbacks have seen the collection
            enable_version_counter=False,  # after a kill the same collection is saved again, under the same name
        )
        self._validated = False

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._validated = True

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        validated, self._validated = self._validated, False
        if validated:
            super().on_train_epoch_end(trainer, pl_module)
