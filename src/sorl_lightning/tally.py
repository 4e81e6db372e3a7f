"""Means and maxima over an optimiser batch that arrives in micro-batches."""

from __future__ import annotations

import torch
from torch import Tensor

from sorl_lightning import ranks


class Tally:
    """Sums that give the same figures however the batch was split over micro-batches and ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> None:
        """Add to a plain sum."""
        self._sums[name] = self._sums.get(name, torch.zeros((), device=value.device)) + value.detach().double()

    def add_mean(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Add the values where ``mask`` (None: all of them) to a mean over all that will have been added.

        A figure that every rank knows whole is such a mean too, with one value a rank.
        """
        kept = values.detach().flatten() if mask is None else values.detach()[mask]
        self.add(name, kept.sum())
        self._counts[name] = self._counts.get(name, torch.zeros((), device=kept.device)) + kept.numel()

    def add_maximum(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Keep the largest value where ``mask``."""
        kept = values.detach()[mask].double()
        largest = kept.max() if kept.numel() else kept.new_full((), -torch.inf)
        self._maxima[name] = torch.maximum(self._maxima.get(name, largest), largest)

    def flush(self) -> dict[str, Tensor]:
        """All figures, over all ranks, and an empty tally again. Every rank must have added the same names."""
        if not self._sums:
            return {}
        zero = torch.zeros((), dtype=torch.float64)
        parts = {
            **self._sums,
            **{f"count {name}": count for name, count in self._counts.items()},
            **{f"maximum {name}": largest for name, largest in self._maxima.items()},
        }
        values = torch.stack([part.to(zero) for part in parts.values()])
        everyone = torch.stack(ranks.gather(values))
        sums = dict(zip(parts, everyone.sum(0), strict=True))
        maxima = dict(zip(parts, everyone.amax(0), strict=True))
        figures = {
            name: sums[name] / sums[f"count {name}"].clamp(min=1) if name in self._counts else sums[name]
            for name in self._sums
        }
        largest = {name: maxima[f"maximum {name}"] for name in self._maxima}
        figures.update({name: value for name, value in largest.items() if value > -torch.inf})
        self.__init__()  # type: ignore[misc]
        return figures
