"""What the page says of a cell, from its runs' files."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sorl_lightning.functional.collapse import has_collapsed
from studies.stability.cells import CELLS

Record = dict[str, Any]
GROUP_TOKEN, GROUP_TURN = ("GRPO", "S-GRPO"), ("Turn-GRPO", "SO-GRPO")
CRITIC_TOKEN, CRITIC_TURN = ("PPO", "S-PPO"), ("Turn-PPO", "SO-PPO")
POOLS = {
    "with the token ratio": GROUP_TOKEN + CRITIC_TOKEN,
    "with the turn ratio": GROUP_TURN + CRITIC_TURN,
    "without the normalization": ("GRPO", "Turn-GRPO", "PPO", "Turn-PPO"),
    "with it": ("S-GRPO", "SO-GRPO", "S-PPO", "SO-PPO"),
    "GRPO, token": GROUP_TOKEN,
    "GRPO, turn": GROUP_TURN,
    "PPO, token": CRITIC_TOKEN,
    "PPO, turn": CRITIC_TURN,
}


def load(folder: Path) -> dict[str, list[Record]]:
    """A regime's results by cell, each cell's in the order of their seeds."""
    records = sorted((json.loads(path.read_text()) for path in folder.glob("*.json")), key=lambda r: r["seed"])
    return {cell.name: [record for record in records if record["cell"] == cell.name] for cell in CELLS}


def last_fifth(curve: Sequence[float]) -> Sequence[float]:
    """The part of a run that decides whether it collapsed."""
    return curve[len(curve) - math.ceil(len(curve) / 5) :]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean and standard deviation; of a single value the value, of none a dash."""
    if len(values) < 2:
        return "".join(f"{value:.{digits}f}" for value in values) or "-"
    return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


@dataclass(frozen=True)
class Figures:
    """A cell's figures, as the page shows them.

    Attributes:
        records: of its runs, one a seed.
    """

    records: Sequence[Record]

    def _late(self, name: str) -> list[float]:
        curves = [record["curves"][name] for record in self.records if name in record["curves"]]
        return [statistics.fmean(last_fifth(curve)) for curve in curves]

    def _first(self, name: str) -> list[float]:
        return [record["curves"][name][0] for record in self.records if name in record["curves"]]

    @property
    def seeds(self) -> int:
        """Number of runs."""
        return len(self.records)

    @property
    def collapses(self) -> int:
        """Runs whose success stayed below half of its best for the whole last fifth."""
        return sum(has_collapsed(record["curves"]["success"]) for record in self.records)

    @property
    def sudden(self) -> str:
        """Out of those, the ones below half of their first collection's success in their second already."""
        curves = [record["curves"]["success"] for record in self.records]
        count = sum(has_collapsed(curve) and curve[1] < curve[0] / 2 for curve in curves)
        return f"{count} of {self.collapses}"

    @property
    def collapsed(self) -> str:
        """The same out of how many."""
        return f"{self.collapses} of {self.seeds}"

    @property
    def finals(self) -> list[float]:
        """Mean success over the last fifth, of each seed."""
        return self._late("success")

    @property
    def final(self) -> str:
        """Its mean and standard deviation over seeds."""
        return spread(self.finals)

    @property
    def each(self) -> str:
        """It, seed by seed."""
        return ", ".join(f"{value:.2f}" for value in self.finals)

    @property
    def start(self) -> str:
        """Success of the first collection, which the warm start collects."""
        return spread(self._first("success"))

    @property
    def second(self) -> str:
        """Success of the second collection, after the first one's updates."""
        return spread([record["curves"]["success"][1] for record in self.records])

    @property
    def best(self) -> str:
        """Success of the best collection."""
        return spread([max(record["curves"]["success"]) for record in self.records])

    @property
    def dead(self) -> str:
        """Share of groups whose rewards are all equal, last fifth."""
        return spread(self._late("constant_groups"))

    @property
    def clipped_tokens(self) -> str:
        """Share of generated tokens that are clipped in the first collection, where all cells have the same data."""
        return spread(self._first("clip_fraction"))

    @property
    def clipped_turns(self) -> str:
        """Share of turns with a clipped token there."""
        return spread(self._first("clip_fraction_turns"))

    @property
    def bias(self) -> str:
        """Largest ||C|| of a collection's mean, median over seeds."""
        largest = [max(record["curves"]["bias_norm"]) for record in self.records if "bias_norm" in record["curves"]]
        return f"{statistics.median(largest):.2f}" if largest else "-"

    @property
    def factor(self) -> str:
        """Mean factor of the normalization over the run; without the switch what it would have been."""
        return spread(
            [statistics.fmean(record["curves"]["factor"]) for record in self.records if "factor" in record["curves"]]
        )

    @property
    def explained(self) -> str:
        """Explained variance of the critic, last fifth."""
        return spread(self._late("explained_variance"))

    @property
    def entropy(self) -> str:
        """Of the policy, nats a token, last fifth."""
        return spread(self._late("entropy"))

    @property
    def updates(self) -> int:
        """Optimiser steps of a run."""
        return max((r["updates"] * len(r["curves"]["success"]) for r in self.records), default=0)

    @property
    def cpu(self) -> str:
        """Processor seconds a run."""
        return f"{statistics.fmean(r['cpu_seconds'] for r in self.records):.0f}" if self.records else "-"


def figures(results: dict[str, list[Record]]) -> dict[str, Figures]:
    """Of every cell."""
    return {name: Figures(records) for name, records in results.items()}


def pools(results: dict[str, list[Record]]) -> dict[str, Figures]:
    """Of the cells of the 2 x 2 x 2 that have a ratio, or the switch, in common, taken together."""
    return {pool: Figures([record for name in names for record in results[name]]) for pool, names in POOLS.items()}
