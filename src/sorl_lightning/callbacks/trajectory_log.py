"""Show what the policy actually says."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from typing_extensions import override

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.collector import Collection
from sorl_lightning.types import Trajectory


class TrajectoryLog(Callback):
    """Write sampled trajectories to TensorBoard's text panel.

    Args:
        every_n_collections: how often.
        count: trajectories each time; the first siblings of the first groups.
    """

    def __init__(self, every_n_collections: int = 5, count: int = 4) -> None:
        if every_n_collections < 1:
            raise ConfigurationError(
                f"trajectory_log.every_n_collections must be at least 1, got {every_n_collections}"
            )
        if count < 0:
            raise ConfigurationError(f"trajectory_log.count must be 0 or more, got {count}")
        self.every_n_collections = every_n_collections
        self.count = count

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        collection: Collection | None = trainer.datamodule.collection  # type: ignore[attr-defined]
        if collection is None or collection.index % self.every_n_collections:
            return
        chosen = [t for t in collection.trajectories if t.sibling == 0][: self.count]
        text = "\n\n---\n\n".join(transcript(trajectory) for trajectory in chosen)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("rollout/trajectories", text, collection.policy_version)


def transcript(trajectory: Trajectory) -> str:
    """A trajectory as Markdown: its turns, reward and ending."""
    head = (
        f"**{trajectory.task.id}** reward {trajectory.reward:.3g}, {len(trajectory.turns)} turns, "
        f"{trajectory.ending.value}{', success' if trajectory.success else ''}"
    )
    turns = [f"**{turn.index}** `{turn.text}` → {turn.observation or ''}" for turn in trajectory.turns]
    return "\n\n".join([head, *turns])
