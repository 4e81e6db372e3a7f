"""ALFWorld's games on disk, in the layout that ``alfworld-download`` leaves and ``sorl data alfworld`` makes.

FOLDER/json_2.1.1/{train,valid_seen,valid_unseen}/TASK/TRIAL/{game.tw-pddl,traj_data.json}
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from sorl_lightning.errors import ConfigurationError

GAMES = "json_2.1.1"
FOLDERS = {"train": "train", "validation": "valid_seen", "test": "valid_unseen"}
TASK_TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
# Parts of a path whose games the package leaves out: its text engine cannot play them.
UNPLAYABLE = ("movable", "Sliced")
GAME_KEYS = ("pddl_domain", "grammar", "pddl_problem")
REMEDY = "download the games with alfworld-download, or make some: sorl data alfworld FOLDER"


class GameFile(NamedTuple):
    """One game: its file, its place below the split's folder, and its type of task."""

    path: str
    name: str
    task_type: str


def data_folder(setting: str | None) -> Path:
    """The folder that ``setting``, else the variable ALFWORLD_DATA, names; the package's own default otherwise."""
    chosen = setting or os.environ.get("ALFWORLD_DATA") or "~/.cache/alfworld"
    return Path(os.path.expandvars(chosen)).expanduser()


@lru_cache(maxsize=16)
def games_of(folder: Path, split: str, task_types: Sequence[str]) -> tuple[GameFile, ...]:
    """All playable games of these types in a split: the first of each type by name, then the second of each, and so on.

    Raises:
        ConfigurationError: there are none, or a file is not what it should be.
    """
    place = folder / GAMES / FOLDERS[split]
    if not place.is_dir():
        raise ConfigurationError(f"data: {place} is not a folder; {REMEDY}")
    found: list[GameFile] = []
    for path in sorted(place.rglob("game.tw-pddl")):
        name = path.parent.relative_to(place).as_posix()
        if any(part in name for part in UNPLAYABLE):
            continue
        task_type = read(path.parent / "traj_data.json", ("task_type",))["task_type"]
        if task_type in task_types and read(path, GAME_KEYS).get("solvable", False):
            found.append(GameFile(str(path), name, task_type))
    if not found:
        raise ConfigurationError(f"data: {place} has no solvable game of {', '.join(task_types)}; {REMEDY}")
    by_type = [[game for game in found if game.task_type == task_type] for task_type in task_types]
    return tuple(game for together in zip_longest(*by_type) for game in together if game is not None)


def read(path: Path, keys: Sequence[str]) -> dict[str, Any]:
    """A JSON object with these keys.

    Raises:
        ConfigurationError: it is missing, or something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigurationError(f"data: there is no file {path}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"data: {path} is not JSON in UTF-8: {error}") from error
    missing = [key for key in keys if not isinstance(content, dict) or key not in content]
    if missing:
        raise ConfigurationError(f"data: {path} has no {', '.join(missing)}")
    return dict(content)
