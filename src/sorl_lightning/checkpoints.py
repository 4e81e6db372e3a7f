"""Checkpoints that are there whole or not at all."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from typing_extensions import override

from sorl_lightning.errors import ConfigurationError


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target and renames: a kill at any moment leaves the older checkpoint or the newer one."""

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with unfinished(target).open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        install(unfinished(target), target)

    @override
    def load_checkpoint(self, path: Any, *arguments: Any, **settings: Any) -> dict[str, Any]:
        try:
            return super().load_checkpoint(path, *arguments, **settings)
        except (RuntimeError, pickle.UnpicklingError, EOFError, KeyError) as error:
            raise ConfigurationError(f"ckpt_path {str(path)!r} holds no checkpoint: {error}") from error


def unfinished(target: Path) -> Path:
    """Where ``target`` is written first: one name, so that a killed attempt's leftover is overwritten by the next."""
    return target.with_name(f".{target.name}.unfinished")


def install(source: Path, target: Path) -> None:
    """Rename ``source`` to ``target``, and see that the rename is on disk."""
    os.replace(source, target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
