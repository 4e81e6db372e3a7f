"""The regimes of the study: a game, a warm start, how much is trained, and the grid that a setting was taken from."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all cells of a regime have in common beside its YAML.

    Attributes:
        learning_rate: of AdamW.
        clip_range: both sides.
    """

    learning_rate: float
    clip_range: float

    def __str__(self) -> str:
        return f"lr{self.learning_rate:g}-clip{self.clip_range:g}"


@dataclass(frozen=True, kw_only=True)
class Regime:
    """Where the cells are compared.

    Attributes:
        name: of its YAML, and of the folder of its results.
        warm_start: config that trains the policy that every run starts from.
        folder: where the warm start is left.
        setting: of every run.
        grid: settings that were scouted with two cells and one seed before ``setting`` was chosen; none: not scouted.
        collections: of a run.
        scouted_collections: of a run of the grid.
        reason: how it was chosen, for the page.
    """

    name: str
    warm_start: str
    folder: str
    setting: Setting
    collections: int
    reason: str
    grid: tuple[Setting, ...] = ()
    scouted_collections: int = 0

    @property
    def base(self) -> Path:
        """Config on top of the quickstart's."""
        return HERE / f"{self.name}.yaml"

    @property
    def data(self) -> dict[str, Any]:
        """Its YAML's settings of the datamodule."""
        return yaml.safe_load(self.base.read_text())["data"]

    @property
    def passes(self) -> int:
        """Over each collection."""
        return self.data["passes"]


GRID = tuple(
    Setting(learning_rate=rate, clip_range=clip_range) for rate, clip_range in product((1e-3, 3e-3), (0.2, 0.4))
)
COIN = Regime(
    name="coin",
    warm_start="sorl:coin_imitation",
    folder="runs/coin_imitation/policy",
    setting=Setting(learning_rate=3e-3, clip_range=0.2),
    collections=10,
    reason="Eight fixed tasks, at most seven turns. Learning rate, clip range and updates a collection are those at which a throwaway "
    "prototype collapsed with the token ratio, on another game (`twc`); they were taken as they were, without scouting on this one.",
)
SIMONSAYS = Regime(
    name="simonsays",
    warm_start="sorl:quickstart_imitation",
    folder="runs/quickstart_imitation/policy",
    setting=Setting(learning_rate=1e-3, clip_range=0.2),
    grid=GRID,
    collections=8,
    scouted_collections=5,
    reason="Tasks are new in every collection; the quickstart makes 2 updates of each, here it is 16. Learning rate and clip range are "
    "the one setting of the grid at which either scouted cell ended at twice its start or more, so that there is growth to lose. The scouting's seed is the "
    "study's first: its GRPO and SO-GRPO begin as the scouting's did, and lean towards growth.",
)
REGIMES = (COIN, SIMONSAYS)
