"""A model that another config trains first."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from sorl_lightning.errors import ConfigurationError


@dataclass(kw_only=True)
class WarmStart:
    """A model that another config trains first.

    Args:
        config: config of the run that leaves ``folder`` behind.
        folder: Hugging Face folder; the run is skipped where it exists, and where no setting of the model names it.
    """

    config: str
    folder: str


class TrainedFirst(Callback):
    """Trains the warm start where it is missing: once the run's own settings are known to work, on one rank."""

    def __init__(self, warm_start: WarmStart) -> None:
        self.warm_start = warm_start

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        folder = self.warm_start.folder
        if trainer.is_global_zero and Path(folder).exists():
            print(f"sorl: {folder} is there, and is not trained again; remove it to have it made anew", flush=True)
        elif trainer.is_global_zero:
            prepare(self.warm_start.config, folder)
        trainer.strategy.barrier()


# What torchrun and Slurm tell a rank, from which a process would take itself for one.
LAUNCHERS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_", "TORCHELASTIC_",
             "SLURM_", "NODE_RANK")  # fmt: skip


def prepare(config: str, folder: str) -> None:
    """Run ``config`` in a process of its own, so that this run starts from a clean slate.

    Raises:
        ConfigurationError: the run failed, or left no ``folder``.
    """
    print(f"sorl: {folder} is not there yet: training it with --config {config}", flush=True)
    command = [sys.executable, "-m", "sorl_lightning", "fit", "--config", config]
    alone = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    code = subprocess.run(command, check=False, env=alone).returncode
    if code or not Path(folder).exists():
        raise ConfigurationError(f"warm_start.config {config!r} ended with code {code} and left no {folder!r}")
