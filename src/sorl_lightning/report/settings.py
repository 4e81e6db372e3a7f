"""The settings of runs, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sorl_lightning.report.runs import Run

ABSENT = "\N{EM DASH}"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting; ``values`` has that of each run, as YAML would show it."""

    name: str
    values: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """Whether the runs do not agree on it."""
        return len(set(self.values)) > 1


def settings_of(runs: Sequence[Run]) -> list[Setting]:
    """All settings that some run's config.yaml has, in the order of the first that has them."""
    flat = [dict(flattened(run.config)) for run in runs]
    names = dict.fromkeys(name for settings in flat for name in settings)
    return [Setting(name, tuple(settings.get(name, ABSENT) for settings in flat)) for name in names]


def flattened(node: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names and values. A class's arguments follow its place; of a list, classes are told by their names."""
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from flattened(value, name if key == "init_args" else f"{name}.{key}" if name else str(key))
    elif isinstance(node, list) and node and all(isinstance(item, Mapping) and "class_path" in item for item in node):
        for item in node:
            yield from flattened(item, f"{name}.{item['class_path'].rpartition('.')[2]}")
    elif name:
        yield name, shown(node)


def shown(value: Any) -> str:
    """A value as a line of YAML would have it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
