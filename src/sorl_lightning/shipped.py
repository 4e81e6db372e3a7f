"""Files that ship with the package: configs, switches, the versions that it was tested with."""

from __future__ import annotations

from pathlib import Path

from sorl_lightning.errors import ConfigurationError

PREFIX = "sorl:"
FOLDERS = ("configs", "callbacks")


def root() -> Path:
    """Where they lie: in the package, or in the repository that it is run from."""
    package = Path(__file__).parent
    installed = package / "yaml"
    return installed if installed.exists() else package.parents[1]


def shipped(folder: str) -> dict[str, Path]:
    """Files of ``configs`` or ``callbacks`` by the name that follows "sorl:", sorted."""
    place = root() / folder
    return {str(path.relative_to(place).with_suffix("")): path for path in sorted(place.rglob("*.yaml"))}


def shipped_file(argument: str) -> str:
    """The path of "sorl:NAME", a config or switch that ships with the package; other arguments as they are.

    Raises:
        ConfigurationError: there is no such file.
    """
    option, prefix, name = argument.rpartition(PREFIX)
    if not prefix or option not in ("", "--config=", "-c="):
        return argument
    for folder in FOLDERS:
        if name in (files := shipped(folder)):
            return option + str(files[name])
    raise ConfigurationError(
        f"no config or switch {argument!r} ships with the package; sorl configs and sorl callbacks list them"
    )
