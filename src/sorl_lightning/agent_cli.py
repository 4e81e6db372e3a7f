"""LightningCLI for rollouts: links between the parts, checkpoints, logs, warm start, and what is refused in time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from sorl_lightning.callbacks import (
    BestCheckpoint,
    CollectionAxis,
    GracefulStop,
    HFExport,
    ProgressLines,
    ScalarLayout,
    TrajectoryLog,
)
from sorl_lightning.checkpoints import is_there
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.linked_settings import check_links, link
from sorl_lightning.models import check_place
from sorl_lightning.shipped import shipped
from sorl_lightning.trainer_settings import atomic_checkpoints, check_monitor, check_trainer, chosen_strategy
from sorl_lightning.warm_start import TrainedFirst, WarmStart

# What libraries raise at a setting that they refuse, before anything runs.
REFUSALS = (MisconfigurationException, ValueError, TypeError, ImportError, AttributeError, OSError, RuntimeError)


class AgentCLI(LightningCLI):
    """Adds the links between the parts, checkpoints and trajectory log, and the warm start."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Those of LightningCLI that mean something for rollouts."""
        return {name: skipped for name, skipped in LightningCLI.subcommands().items() if name != "predict"}

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        link(parser)
        # Before the checkpoint that is resumed from, which holds its memory.
        parser.add_lightning_class_args(BestCheckpoint, "best_checkpoint")
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.set_defaults(
            {
                "checkpoint.save_on_train_epoch_end": True,
                "checkpoint.save_last": True,
                "checkpoint.filename": "{epoch:04d}",
                "checkpoint.monitor": "collection",  # so the best are the last
                "checkpoint.mode": "max",
                "checkpoint.save_top_k": 2,
                "checkpoint.enable_version_counter": False,  # a resumed run writes again what a killed one had begun
            }
        )
        parser.add_lightning_class_args(GracefulStop, "graceful_stop")
        parser.add_lightning_class_args(TrajectoryLog, "trajectory_log")
        parser.add_lightning_class_args(CollectionAxis, "collection_axis")
        parser.add_lightning_class_args(ScalarLayout, "scalar_layout")
        parser.add_lightning_class_args(HFExport, "hf_export")
        parser.add_argument("--warm_start", type=WarmStart | None, default=None, help="model that is trained first")

    @override
    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        config = self.config_init[self.subcommand]["trainer"]
        try:
            trainer = super().instantiate_trainer(**kwargs, **chosen_strategy(config), **atomic_checkpoints(config))
        except REFUSALS as error:
            place = ", ".join(
                f"{name}={config[name]!r}" for name in ("accelerator", "devices", "strategy", "precision")
            )
            raise ConfigurationError(f"trainer ({place}): {one_sentence(error)}") from error
        if not sys.stdout.isatty() and config["enable_progress_bar"] is not False:
            trainer.callbacks.append(ProgressLines())  # type: ignore[attr-defined]
        warm_start = used_warm_start(self.config[self.subcommand])
        if warm_start is not None:
            trainer.callbacks.insert(0, TrainedFirst(warm_start))  # type: ignore[attr-defined]
        return trainer

    @override
    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except ConfigurationError:
            raise
        except REFUSALS as error:
            raise ConfigurationError(one_sentence(error)) from error

    @override
    def _parse_ckpt_path(self) -> None:
        """Nothing: a run's settings are its config, and ``check_checkpoint`` says what is no checkpoint."""

    @override
    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        check_links(config)
        check_trainer(config.trainer)
        check_checkpoint(config.get("ckpt_path"))
        for name in ("checkpoint", "best_checkpoint"):
            check_monitor(f"{name}.monitor", config[name].monitor)

    def before_fit(self) -> None:
        """What is checked when a run begins, not when a config is only built."""
        config = self.config[self.subcommand]
        check_policy(config.model.policy, used_warm_start(config))

    def before_validate(self) -> None:
        """The same, and what is measured is said."""
        self.before_fit()
        config = self.config[self.subcommand]
        if config.get("ckpt_path") is None:
            print("sorl: no --ckpt_path is given: this measures model.policy as it is, before any training", flush=True)

    before_test = before_validate


def one_sentence(error: Exception) -> str:
    """An error's message without its line breaks, and without the usage that a parser shows before it."""
    return " ".join(str(error).split()) or type(error).__name__


def used_warm_start(config: Any) -> WarmStart | None:
    """The warm start of a run whose model names its folder: with another model nobody would read it."""
    start: WarmStart | None = config.get("warm_start")
    return start if start is not None and any(value == start.folder for _, value in config.model.items()) else None


def check_policy(policy: Any, warm_start: WarmStart | None) -> None:
    """Refuse a policy's folder that is not there and that no warm start will make, the one before it included.

    Raises:
        ConfigurationError: it is neither a folder nor can be a Hub id.
    """
    path = policy if isinstance(policy, str) else getattr(policy.get("init_args"), "path", None)
    if path is not None and (warm_start is None or Path(warm_start.folder).exists()):
        try:
            check_place(path)
        except ConfigurationError as error:
            makers = [f"sorl:{n}" for n, file in shipped("configs").items() if f"folder: {path}" in file.read_text()]
            hint = f"; sorl fit --config {makers[0]} makes it" if makers else ""
            raise ConfigurationError(f"model.policy: {error}{hint}") from error


def check_checkpoint(path: str | None) -> None:
    """Refuse a checkpoint that is not there.

    Raises:
        ConfigurationError: it is neither a file, nor a folder, nor a word that Lightning knows.
    """
    if path is not None and path not in ("best", "last", "hpc") and not is_there(Path(path)):
        raise ConfigurationError(f"ckpt_path {path!r} is neither a file nor a folder")
