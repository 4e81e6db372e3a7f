"""TensorBoard with another x-axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from typing_extensions import override


class AxisLogger(TensorBoardLogger):
    """A TensorBoard run beside the main one, whose x-axis is one of the logged figures.

    Lightning counts optimiser steps; collections are the other natural unit. Figures logged without ``axis`` are
    placed at its last value.

    Args:
        save_dir: folder of the runs.
        axis: name of the figure to use as x.
        name: name of the experiment.
        version: name of the run.
    """

    def __init__(
        self, save_dir: str, axis: str = "collection", name: str = "", version: str | None = "by_collection"
    ) -> None:
        super().__init__(save_dir=save_dir, name=name, version=version, default_hp_metric=False)
        self.axis = axis
        self._last = 0

    @override
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._last = int(metrics.get(self.axis, self._last))
        super().log_metrics(dict(metrics), self._last)

    @override
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """The main run has them."""
