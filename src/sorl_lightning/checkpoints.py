"""Checkpoints that are there whole or not at all."""

from __future__ import annotations

import os
import shutil
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
            try:
                torch.save(checkpoint, file)
            except RuntimeError as error:
                # A stop in the middle of a write leaves an archive that torch fails to close; the stop is what counts.
                if isinstance(error.__context__, SystemExit):
                    raise error.__context__ from None
                raise
            file.flush()
            os.fsync(file.fileno())
        install(unfinished(target), target)

    @override
    def load_checkpoint(self, path: Any, *arguments: Any, **settings: Any) -> dict[str, Any]:
        if os.path.isdir(path):
            raise ConfigurationError(
                f"ckpt_path {str(path)!r} is a folder: those of FSDP2 with save_distributed_checkpoint are resumed "
                "under FSDP2"
            )
        try:
            content = super().load_checkpoint(path, *arguments, **settings)
        except Exception as error:  # whatever unpickling foreign bytes may raise
            raise ConfigurationError(f"ckpt_path {str(path)!r} holds no checkpoint: {error}") from error
        if not isinstance(content, dict) or not {"state_dict", "pytorch-lightning_version"} <= content.keys():
            raise ConfigurationError(f"ckpt_path {str(path)!r} holds something else than the checkpoint of a run")
        return content


def unfinished(target: Path) -> Path:
    """Where ``target`` is written first: one name, so that a killed attempt's leftover is overwritten by the next."""
    return target.with_name(f".{target.name}.unfinished")


def older(target: Path) -> Path:
    """Where a folder is set aside while a new one takes its name: folders cannot replace one another in one step."""
    return target.with_name(f".{target.name}.old")


def is_there(target: Path) -> bool:
    """Whether ``target`` can be resumed from, by its own name or set aside by a run that was killed then."""
    return target.exists() or older(target).exists()


def install_folder(source: Path, target: Path) -> None:
    """Rename the folder ``source`` to ``target``; at any moment one of ``target`` and ``older(target)`` is whole."""
    if target.exists():
        shutil.rmtree(older(target), ignore_errors=True)
        target.rename(older(target))
    install(source, target)
    shutil.rmtree(older(target), ignore_errors=True)


def put_back(target: Path) -> None:
    """Give ``older(target)`` its name again where a run was killed before the new folder had taken it."""
    if not target.exists() and older(target).exists():
        older(target).rename(target)


def install(source: Path, target: Path) -> None:
    """Rename ``source`` to ``target``, and see that the rename is on disk."""
    os.replace(source, target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
