"""Settings of one part that the command takes from another's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml
from jsonargparse import Path
from lightning.pytorch.cli import LightningArgumentParser

from sorl_lightning.errors import ConfigurationError

LINKS = {"model.temperature": "data.temperature", "trainer.accumulate_grad_batches": "data.micro_batches"}


def link(parser: LightningArgumentParser) -> None:
    """Give each of ``LINKS`` the value of its source."""
    for target, source in LINKS.items():
        parser.link_arguments(source, target)


def check_links(config: Any) -> None:
    """Refuse a config file that gives a linked setting another value than its source has: it would be overridden.

    Args:
        config: of the subcommand, with the paths of the files that it was read from.

    Raises:
        ConfigurationError: names both settings.
    """
    for target, source in LINKS.items():
        for file, value in _written(config, target):
            if not _equal(value, config[source]):
                raise ConfigurationError(
                    f"{target}={value!r} (in {file}) must equal {source}={config[source]!r}, from which the command "
                    f"takes it: set {source} alone"
                )


def _written(config: Any, target: str) -> Iterator[tuple[str, Any]]:
    """What files say about ``target``: whole configs, or the file of its section alone."""
    section, name = target.split(".")
    for file in config.get("config") or []:
        content = _content(file).get(section)
        if isinstance(content, dict) and name in content:
            yield str(file), content[name]
    own = config[section].get("__path__")
    if own is not None and name in _content(own):
        yield str(own), _content(own)[name]


def _content(file: Any) -> dict[str, Any]:
    if not isinstance(file, Path):
        return {}
    with file.open() as stream:
        content = yaml.safe_load(stream)
    return content if isinstance(content, dict) else {}


def _equal(value: Any, wanted: float) -> bool:
    try:
        return float(value) == wanted
    except (TypeError, ValueError):
        return False
