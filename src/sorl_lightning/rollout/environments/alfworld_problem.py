"""A room and a goal as a planning problem in ALFRED's dialect of PDDL."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

# Characters of ALFRED's identifiers that PDDL has no place for, as the release data spell them.
SPELLINGS = (("-", "_minus_"), ("#", "-"), ("|", "_bar_"), ("+", "_plus_"), (".", "_dot_"), (",", "_comma_"))
# Named by the domain's own actions, so every problem declares them.
NEEDED_TYPES = {"otype": ("Knife", "ButterKnife"), "rtype": ("SinkBasin", "Microwave", "Fridge")}
BASINS = {"SinkBasin": "Sink", "BathtubBasin": "Bathtub"}
ABILITIES = (("cleanable", "Cleanable"), ("heatable", "Heatable"), ("coolable", "Coolable"), ("sliceable", "Sliceable"))
START = "loc|0|0|99|30"


class Receptacle(NamedTuple):
    """A piece of furniture: its identifier, its kind, and whether it opens."""

    identifier: str
    kind: str
    opens: bool


class Item(NamedTuple):
    """A thing and where it lies."""

    identifier: str
    kind: str
    place: Receptacle

    @staticmethod
    def identifier_of(kind: str, chance: random.Random) -> str:
        """A new identifier, in the release data's form of kind and coordinates."""
        x, y, z = chance.uniform(-4, 4), chance.uniform(0, 2), chance.uniform(-4, 4)
        identifier = f"{BASINS.get(kind, kind)}|{x:+06.2f}|{y:+06.2f}|{z:+06.2f}"
        return f"{identifier}|{kind}" if kind in BASINS else identifier


class Room(NamedTuple):
    """What there is."""

    receptacles: tuple[Receptacle, ...]
    items: tuple[Item, ...]


def problem(
    constants: Any, room: Room, goal: str, thing: str, target: str, lamp: str | None, chance: random.Random
) -> str:
    """The whole problem.

    Args:
        constants: of the alfworld package.
        goal: the package's goal of the task, with places for the names of its object, receptacle and lamp.
    """
    locations = {
        receptacle.identifier: f"loc|{chance.randint(-20, 20)}|{chance.randint(-20, 20)}|{number}|45"
        for number, receptacle in enumerate(room.receptacles)
    }
    lines = [
        "(define (problem made)", "(:domain alfred)", "(:objects", "agent1 # agent", *declared(room, locations), ")",
        "(:init", "(= (total~cost) 0)", *furniture(constants, room, locations), *contents(constants, room, locations),
        f"(atLocation agent1 {START})", ")",
    ]  # fmt: skip
    wanted = goal.format(obj=thing, recep=target, toggle=lamp or "")
    return f"{spelled(chr(10).join(lines)).replace('~', '-')}\n{spelled(wanted)}"


def spelled(text: str) -> str:
    """``text`` with ALFRED's identifiers as PDDL takes them; "#" stands for the dash of a declaration."""
    for character, name in SPELLINGS:
        text = text.replace(character, name)
    return text


def declared(room: Room, locations: dict[str, str]) -> Iterator[str]:
    """Types and objects."""
    furniture = {receptacle.kind for receptacle in room.receptacles} | set(NEEDED_TYPES["rtype"])
    things = ({item.kind for item in room.items} | set(NEEDED_TYPES["otype"])) - furniture
    yield from (f"{kind}Type # otype" for kind in sorted(things))
    yield from (f"{kind}Type # rtype" for kind in sorted(furniture))
    yield from (f"{item.identifier} # object" for item in room.items)
    yield from (f"{receptacle.identifier} # receptacle" for receptacle in room.receptacles)
    yield from (f"{location} # location" for location in (*locations.values(), START))


def furniture(constants: Any, room: Room, locations: dict[str, str]) -> Iterator[str]:
    """Facts about receptacles."""
    things = sorted({item.kind for item in room.items})
    for identifier, kind, opens in room.receptacles:
        yield f"(receptacleType {identifier} {kind}Type)"
        yield f"(receptacleAtLocation {identifier} {locations[identifier]})"
        if opens:
            yield f"(openable {identifier})"
    for kind in sorted({receptacle.kind for receptacle in room.receptacles}):
        held = constants.VAL_RECEPTACLE_OBJECTS.get(kind, ())
        yield from (f"(canContain {kind}Type {thing}Type)" for thing in things if thing in held)


def contents(constants: Any, room: Room, locations: dict[str, str]) -> Iterator[str]:
    """Facts about things."""
    able = constants.VAL_ACTION_OBJECTS
    for identifier, kind, place in room.items:
        yield f"(objectType {identifier} {kind}Type)"
        yield f"(inReceptacle {identifier} {place.identifier})"
        yield f"(objectAtLocation {identifier} {locations[place.identifier]})"
        yield f"({'toggleable' if kind in able['Toggleable'] else 'pickupable'} {identifier})"
        yield from (f"({fact} {identifier})" for fact, ability in ABILITIES if kind in able[ability])
