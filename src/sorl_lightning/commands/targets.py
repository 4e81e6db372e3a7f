"""Where commands write: only where nothing is yet."""

from __future__ import annotations

from pathlib import Path

from sorl_lightning.errors import ConfigurationError


def absent(folder: str, setting: str = "folder") -> Path:
    """The folder, which must not exist.

    Raises:
        ConfigurationError: it does; ``setting`` is named.
    """
    target = Path(folder)
    if target.exists():
        raise ConfigurationError(f"{setting}: {target} is there already; nothing is written over it")
    return target
