"""The curves of a regime: median of the seeds, and every seed."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path

from studies.stability.figures import Record

PANELS = {"success": "success", "clip_fraction": "clip fraction", "grad_norm": "gradient norm", "bias_norm": "||C||"}
COLUMNS = {
    "group advantage, 2 x 2": ("GRPO", "Turn-GRPO", "S-GRPO", "SO-GRPO"),
    "critic, 2 x 2": ("PPO", "Turn-PPO", "S-PPO", "SO-PPO"),
    "controls": ("GRPO", "GRPO-smaller-step", "GRPO-one-pass", "GSPO"),
}


def median(curves: Iterable[list[float]]) -> list[float]:
    """Of the seeds that got so far, one a collection."""
    points = zip_longest(*curves)
    return [statistics.median(value for value in values if value is not None) for values in points]


def draw(results: dict[str, list[Record]], path: Path) -> None:
    """Write a picture with a column a comparison, against optimiser steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(PANELS), len(COLUMNS), figsize=(13, 11), sharex=True, sharey="row")
    for column, (title, names) in enumerate(COLUMNS.items()):
        axes[0, column].set_title(title)
        axes[-1, column].set_xlabel("updates")
        for number, name in enumerate(names):
            for panel, tag in zip(axes[:, column], PANELS, strict=True):
                found = [record for record in results[name] if tag in record["curves"]]
                curves = [record["curves"][tag] for record in found]
                for curve in curves:
                    steps = [found[0]["updates"] * index for index in range(len(curve))]
                    panel.plot(steps, curve, color=f"C{number}", alpha=0.3, linewidth=0.8)
                if curves:
                    middle = median(curves)
                    steps = [found[0]["updates"] * index for index in range(len(middle))]
                    panel.plot(steps, middle, color=f"C{number}", label=name, linewidth=1.8)
        if axes[0, column].lines:
            axes[0, column].legend(fontsize=8)
    for row, label in enumerate(PANELS.values()):
        axes[row, 0].set_ylabel(label)
    axes[-1, 0].set_yscale("symlog", linthresh=0.1)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=75, metadata={"Software": None})
    plt.close(figure)
