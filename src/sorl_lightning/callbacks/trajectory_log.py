"""Show what the policy actually says."""

from __future__ import annotations

import io
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from rich.console import Console
from rich.table import Table
from torch import Tensor
from typing_extensions import override

from sorl_lightning import ranks
from sorl_lightning.callbacks.token_records import TokenRecords, record_of
from sorl_lightning.control import HasTokenFigures, Learner, owner_of
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.collection import Collection
from sorl_lightning.trajectory_files import SCHEMA, Record, TrajectoryFiles
from sorl_lightning.types import RolloutBatch


class TrajectoryLog(Callback):
    """Keep sampled trajectories: as JSON lines with the figures of each token, and as text in the logger.

    The lines stand in ``trajectories/`` in the folder of the run's first logger, beside config.yaml;
    docs/trajectory_log.md describes them. A run without a logger writes none. A resumed run first drops those of
    collections that it plays again.

    Args:
        every_n_collections: how often.
        count: trajectories each time, over all ranks: first siblings of the first groups, then second ones, and so on;
            null keeps all that are trained.
        shown: so many of them are text in TensorBoard and rows of the table.
        table: whether the turns of those shown are printed, too.
        max_megabytes: a file that has reached this size is followed by another.
    """

    def __init__(
        self,
        every_n_collections: int = 5,
        count: int | None = 4,
        shown: int = 4,
        table: bool = False,
        max_megabytes: float = 64.0,
    ) -> None:
        if every_n_collections < 1:
            raise ConfigurationError(
                f"trajectory_log.every_n_collections must be at least 1, got {every_n_collections}"
            )
        for name, value in (("count", count), ("shown", shown)):
            if value is not None and value < 0:
                raise ConfigurationError(f"trajectory_log.{name} must be 0 or more, got {value}")
        if not 0 < max_megabytes < math.inf:
            raise ConfigurationError(f"trajectory_log.max_megabytes must be above 0 and finite, got {max_megabytes}")
        self.every_n_collections = every_n_collections
        self.count = count
        self.shown = shown
        self.table = table
        self.max_megabytes = max_megabytes
        self._files: TrajectoryFiles | None = None
        self._records: TokenRecords | None = None
        self._batch: tuple[RolloutBatch, int] | None = None

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._files = None
        if trainer.loggers and trainer.is_global_zero:
            self._files = TrajectoryFiles(run_folder(trainer) / "trajectories", int(self.max_megabytes * 1e6))
            self._files.rewind(trainer.current_epoch)

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: RolloutBatch, batch_idx: int
    ) -> None:
        if batch_idx == 0:
            self._records = self._choose(trainer.datamodule.collection)  # type: ignore[attr-defined]
        self._batch = batch, batch_idx // trainer.accumulate_grad_batches

    def _choose(self, collection: Collection | None) -> TokenRecords | None:
        """The trajectories of this rank that are logged, by their numbers in its share; None in other collections."""
        if collection is None or collection.index % self.every_n_collections:
            return None
        places = [(trajectory.sibling, trajectory.group) for trajectory in collection.sound]
        everywhere = sorted(place for share in ranks.gather(places) for place in share)
        chosen = set(everywhere[: self.count])
        return TokenRecords([number for number, place in enumerate(places) if place in chosen])

    @override
    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        if self._records is not None and self._batch is not None:
            batch, update = self._batch
            figures = owner_of(HasTokenFigures, pl_module).token_figures  # type: ignore[type-abstract]
            self._records.add(batch, figures, update)

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        records, self._records, self._batch = self._records, None, None
        collection: Collection | None = trainer.datamodule.collection  # type: ignore[attr-defined]
        if records is None or collection is None:
            return
        head = {"schema": SCHEMA, "collection": collection.index, "policy_version": collection.policy_version}
        tokenizer = owner_of(Learner, pl_module).tokenizer  # type: ignore[type-abstract]
        own = [{**head, **record_of(collection.sound[n], n, records, tokenizer)} for n in records.chosen.tolist()]
        lines = [line for share in ranks.gather(own) for line in share]
        lines.sort(key=lambda line: (line["sibling"], line["group"]))
        if self._files is not None:
            self._files.append(lines)
        self._show(trainer, pl_module, lines[: self.shown], collection)

    def _show(
        self, trainer: L.Trainer, pl_module: L.LightningModule, lines: Sequence[Record], collection: Collection
    ) -> None:
        if not trainer.is_global_zero:
            return
        text = "\n\n---\n\n".join(transcript(line) for line in lines)
        for logger in trainer.loggers:
            log_text(logger, text, collection)
        if self.table:
            pl_module.print(rendered(turns_table(lines, collection.index)))  # above a progress bar, not through it


def log_text(logger: Logger, text: str, collection: Collection) -> None:
    """Give ``text`` to a logger that takes texts: TensorBoard, Weights & Biases, MLflow."""
    if isinstance(logger, TensorBoardLogger):
        logger.experiment.add_text("rollout/trajectories", text, collection.policy_version)
    elif isinstance(logger, WandbLogger):
        logger.log_text(
            "rollout/trajectories", columns=["collection", "trajectories"], data=[[str(collection.index), text]]
        )
    elif isinstance(logger, MLFlowLogger):
        logger.experiment.log_text(logger.run_id, text, f"trajectories/{collection.index:06d}.md")


def run_folder(trainer: L.Trainer) -> Path:
    """Where the first logger writes, or where checkpoints of a run with such a logger go: no other run's folder."""
    logger = trainer.loggers[0]
    folder = getattr(logger, "log_dir", None)
    return Path(folder or Path(logger.save_dir or trainer.default_root_dir, str(logger.name), str(logger.version)))


def transcript(line: Record) -> str:
    """A line of the log as Markdown: its turns, reward and ending."""
    head = (
        f"**{line['task']}** reward {line['reward']:.3g}, {len(line['turns'])} turns, "
        f"{line['ending']}{', success' if line['success'] else ''}"
    )
    turns = [f"**{turn['index']}** `{turn['text']}` → {turn['observation'] or ''}" for turn in line["turns"]]
    return "\n\n".join([head, *turns])


def turns_table(lines: Sequence[Record], collection: int) -> Table:
    """The turns of a few trajectories, a row each, for the terminal."""
    table = Table(title=f"collection {collection}")
    for name in ("task", "turn", "said", "answer"):
        table.add_column(name, overflow="fold")
    for name in ("reward", "mean ratio", "ending"):
        table.add_column(name, justify="right")
    for line in lines:
        for turn in line["turns"]:
            last = turn is line["turns"][-1]
            ratio = turn["tokens"].get("ratio")
            table.add_row(
                line["task"] if turn["index"] == 0 else "", str(turn["index"]), turn["text"], turn["observation"] or "",
                f"{turn['reward']:.3g}", "" if ratio is None else f"{ratio.mean():.3f}",
                f"{line['ending']}{', success' if line['success'] else ''}" if last else "", end_section=last,
            )  # fmt: skip
    return table


def rendered(table: Table) -> str:
    """The table as text as wide as the terminal."""
    console = Console(file=io.StringIO(), width=shutil.get_terminal_size().columns, markup=False)
    console.print(table)
    return str(console.file.getvalue()).rstrip()  # type: ignore[attr-defined]
