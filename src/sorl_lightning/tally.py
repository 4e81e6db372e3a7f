"""Means and maxima over an optimiser batch that arrives in micro-batches."""

from __future__ import annotations

import torch
from torch import Tensor


class Tally:
    """Sums that give the same figures however the batch was split."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> None:
        """Add to a plain sum."""
        self._sums[name] = self._sums.get(name, torch.zeros((), device=value.device)) + value.detach().double()

    def add_mean(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Add the values where ``mask`` to a mean over all that will have been added."""
        kept = values.detach()[mask]
        self.add(name, kept.sum())
        self._counts[name] = self._counts.get(name, torch.zeros((), device=kept.device)) + kept.numel()

    def add_maximum(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Keep the largest value where ``mask``."""
        kept = values.detach()[mask]
        if kept.numel():
            largest = kept.max()
            self._maxima[name] = torch.maximum(self._maxima.get(name, largest), largest)

    def flush(self) -> dict[str, Tensor]:
        """All figures, and an empty tally again."""
        figures = {
            name: total / self._counts[name].clamp(min=1) if name in self._counts else total
            for name, total in self._sums.items()
        }
        figures.update(self._maxima)
        self.__init__()  # type: ignore[misc]
        return figures
