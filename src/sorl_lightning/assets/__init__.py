"""Small files that ship with the package."""

from __future__ import annotations

from pathlib import Path

from sorl_lightning.errors import ConfigurationError

PREFIX = "sorl:"


def asset_folder(path: str) -> str:
    """``path`` itself, or the package's own folder for "sorl:NAME".

    Raises:
        ConfigurationError: the package ships no such folder.
    """
    if not path.startswith(PREFIX):
        return path
    here = Path(__file__).parent
    shipped = sorted(folder.name for folder in here.iterdir() if folder.is_dir() and not folder.name.startswith("_"))
    name = path.removeprefix(PREFIX)
    if name not in shipped:
        raise ConfigurationError(f"{path!r} does not ship with the package; it has {[PREFIX + n for n in shipped]}")
    return str(here / name)
