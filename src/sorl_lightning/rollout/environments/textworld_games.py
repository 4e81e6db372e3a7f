"""Which TextWorldExpress games there are, and which settings they take."""

from __future__ import annotations

import re
from typing import NamedTuple

from sorl_lightning.errors import ConfigurationError

# As textworld-express 1.1.0 names them; a test compares them with the package.
PARAMETERS: dict[str, tuple[str, ...]] = {
    "coin": ("numLocations", "numDistractorItems", "includeDoors", "limitInventorySize"),
    "twc": ("numLocations", "numItemsToPutAway", "includeDoors", "limitInventorySize"),
    "mapreader": (
        "numLocations",
        "maxDistractorItemsPerLocation",
        "includeDoors",
        "limitInventorySize",
        "maxDistanceApart",
    ),
    "cookingworld": ("numLocations", "numDistractorItems", "numIngredients", "includeDoors", "limitInventorySize"),
    "arithmetic": (),
    "sorting": (),
    "simonsays": ("gameLength", "numDistractors", "memorization", "verbose"),
}


class GameKey(NamedTuple):
    """Which game: its name, its parameters as the package writes them ("a=1,b=2", sorted), its fold and seed."""

    game: str
    parameters: str
    fold: str
    seed: int


def canonical_parameters(game: str, parameters: dict[str, int] | str | None) -> str:
    """Parameters as the package writes them, sorted by name, so that equal settings are equal strings.

    >>> canonical_parameters("coin", {"numLocations": 4, "includeDoors": 0})
    'includeDoors=0,numLocations=4'
    """
    if game not in PARAMETERS:
        raise ConfigurationError(f"game is {game!r}, it can be one of: {', '.join(PARAMETERS)}")
    if isinstance(parameters, str):
        pairs = [part.partition("=") for part in parameters.split(",") if part.strip()]
        parameters = {name.strip(): value.strip() for name, _, value in pairs}  # type: ignore[misc]
    values = parameters or {}
    for name, value in values.items():
        if name not in PARAMETERS[game]:
            allowed = ", ".join(PARAMETERS[game]) or "none"
            raise ConfigurationError(f"parameters names {name!r}, but {game} has: {allowed}")
        if not re.fullmatch(r"-?\d+", str(value)):
            raise ConfigurationError(f"parameter {name} is {value!r}, it needs a whole number")
    return ",".join(f"{name}={int(value)}" for name, value in sorted(values.items()))
