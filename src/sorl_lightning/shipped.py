"""Files that ship with the package: configs, switches, the versions that it was tested with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sorl_lightning.errors import ConfigurationError

PREFIX = "sorl:"
FOLDERS = ("configs", "callbacks")
CONFIG = ("--config", "-c")


def root() -> Path:
    """Where they lie: in the package, or in the repository that it is run from."""
    package = Path(__file__).parent
    installed = package / "yaml"
    return installed if installed.exists() else package.parents[1]


def shipped(folder: str) -> dict[str, Path]:
    """Files of ``configs`` or ``callbacks`` by the name that follows "sorl:", sorted."""
    place = root() / folder
    return {str(path.relative_to(place).with_suffix("")): path for path in sorted(place.rglob("*.yaml"))}


def shipped_files(arguments: Sequence[str]) -> list[str]:
    """Command-line arguments in which every config "sorl:NAME" has become the path of the file that ships.

    Values of other options are left alone: a tokenizer may have such a name too.

    Raises:
        ConfigurationError: there is no such file.
    """
    found, option = [], ""
    for argument in arguments:
        before, prefix, name = argument.rpartition(PREFIX)
        is_config = before in ("--config=", "-c=") or (not before and option in CONFIG)
        found.append(before + _path(name) if prefix and is_config else argument)
        option = argument
    return found


def _path(name: str) -> str:
    for folder in FOLDERS:
        if name in (files := shipped(folder)):
            return str(files[name])
    raise ConfigurationError(
        f"no config or switch 'sorl:{name}' ships with the package; sorl configs and sorl callbacks list them"
    )
