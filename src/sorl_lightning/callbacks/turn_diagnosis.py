"""Where in an episode the teacher has something to say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from typing_extensions import override

from sorl_lightning.control import HasTurnStatistics, owner_of
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.types import TurnProfile, TurnStatistics

SCALE = 8  # pixels of a cell of the heat maps
Figures = dict[str, list[float]]


class TurnDiagnosis(Callback):
    """Report, by turn index and collection: divergence, entropies, loss share, survivors and K_fail - K_succ.

    Each collection's numbers are one line of ``turn_diagnosis.jsonl`` in the logger's folder. TensorBoard shows each
    as a heat map ``turn_diagnosis/NAME``, collections from left to right, turns from top to bottom, dark to light
    from the least to the largest number.

    Args:
        every_n_collections: how often the heat maps are drawn.
        folder: of the numbers; None is the logger's, else the trainer's ``default_root_dir``.
    """

    def __init__(self, every_n_collections: int = 10, folder: str | None = None) -> None:
        if every_n_collections < 1:
            raise ConfigurationError(f"TurnDiagnosis.every_n_collections must be at least 1, got {every_n_collections}")
        self.every_n_collections = every_n_collections
        self.folder = folder
        self.history: list[Figures] = []

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        owner = owner_of(HasTurnStatistics, pl_module)  # type: ignore[type-abstract]
        if owner.turn_statistics is None or owner.turn_profile is None or not trainer.is_global_zero:
            return
        figures = by_turn(owner.turn_statistics, owner.turn_profile)
        self.history.append(figures)
        folder = Path(self.folder or trainer.log_dir or trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "turn_diagnosis.jsonl").open("a") as lines:
            lines.write(json.dumps({"collection": trainer.current_epoch, **figures}) + "\n")
        if len(self.history) % self.every_n_collections == 0:
            self._draw(trainer)

    def _draw(self, trainer: L.Trainer) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                for name in self.history[-1]:
                    image = heat_map([figures[name] for figures in self.history])
                    logger.experiment.add_image(f"turn_diagnosis/{name}", image, trainer.global_step, dataformats="HW")

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"history": list(self.history)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = list(state_dict["history"])


def by_turn(statistics: TurnStatistics, profile: TurnProfile) -> Figures:
    """Numbers of each turn index; means are over the turn's tokens, nats.

    ``failed_less_succeeded`` is K_fail - K_succ, 0 where either has no token; ``loss_share`` sums to 1.
    """
    tokens = profile.tokens.clamp(min=1)
    failed, won = profile.failed_tokens, profile.tokens - profile.failed_tokens
    gap = profile.failed_divergence / failed.clamp(min=1) - (
        profile.divergence - profile.failed_divergence
    ) / won.clamp(min=1)
    total = profile.loss.sum()
    figures = {
        "divergence": profile.divergence / tokens,
        "student_entropy": profile.student_entropy / tokens,
        "teacher_entropy": profile.teacher_entropy / tokens,
        "loss_share": profile.loss / total if total != 0 else profile.loss,
        "survivors": statistics.trajectories,
        "tokens": profile.tokens,
        "failed_less_succeeded": torch.where((failed > 0) & (won > 0), gap, 0.0),
    }
    return {name: values.tolist() for name, values in figures.items()}


def heat_map(columns: list[list[float]]) -> Tensor:
    """Grey levels in [0, 1], turns by collections, each cell SCALE pixels wide and high; missing turns are black."""
    depth = max(map(len, columns))
    grid = torch.full((depth, len(columns)), float("nan"))
    for column, values in enumerate(columns):
        grid[: len(values), column] = torch.tensor(values)
    known = grid[~grid.isnan()]
    spread = (known.max() - known.min()).clamp(min=1e-12) if len(known) else torch.tensor(1.0)
    levels = torch.nan_to_num((grid - (known.min() if len(known) else 0.0)) / spread, nan=0.0)
    return levels.repeat_interleave(SCALE, 0).repeat_interleave(SCALE, 1)
