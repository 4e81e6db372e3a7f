"""New ALFWorld games from what the package carries: rooms of 120 floor plans, goals, rules and grammar.

A room gets the receptacles and small things of its floor plan, each thing where such things may lie. A game asks for
one of the six tasks with a thing that does not start where it has to end, so that every game has a solution.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sorl_lightning.rollout.environments.alfworld_games import TASK_TYPES
from sorl_lightning.rollout.environments.alfworld_problem import Item, Receptacle, Room, problem
from sorl_lightning.rollout.environments.alfworld_simulator import import_package

PLANS = {
    "Kitchen": range(1, 31),
    "LivingRoom": range(201, 231),
    "Bedroom": range(301, 331),
    "Bathroom": range(401, 431),
}
UNSEEN_PLANS = frozenset({10, 219, 308, 424})  # among those that ALFRED keeps for its unseen split
NUMBERS = {
    "CounterTop": (1, 3),
    "StoveBurner": (4, 4),
    "Shelf": (2, 4),
    "SideTable": (1, 2),
    "Drawer": (2, 4),
    "Cabinet": (3, 6),
}
MOST_OF_A_KIND, MOST_OTHER_THINGS = 6, 12
TREATMENT = {
    "pick_clean_then_place_in_recep": ("Cleanable", "SinkBasin"),
    "pick_heat_then_place_in_recep": ("Heatable", "Microwave"),
    "pick_cool_then_place_in_recep": ("Coolable", "Fridge"),
}
LAMPS = ("DeskLamp", "FloorLamp")
LAMP_PLACES = ("Desk", "SideTable", "Dresser", "DiningTable", "Shelf", "CoffeeTable", "TVStand")
NEVER_WANTED = {"HandTowel", "Towel"}  # towels hang on holders that the text engine does not name apart
ATTEMPTS = 200


class Package(NamedTuple):
    """What the alfworld package knows: constants, goals by task, floor plans' folder, domain and grammar."""

    constants: Any
    goals: Any
    layouts: Path
    domain: str
    grammar: str


@dataclass(frozen=True, kw_only=True)
class Game:
    """A made game: its folder's name, and the content of its two files."""

    name: str
    trajectory: dict[str, Any]
    game: dict[str, Any]


def games(count: int, unseen: bool, seed: int) -> Iterator[Game]:
    """``count`` games; types of task take turns, rooms are those of ALFRED's unseen split or the others."""
    package, chance = installed(), random.Random(seed)
    for number in range(count):
        task = TASK_TYPES[number % len(TASK_TYPES)]
        kinds = sorted(set(package.constants.GOALS_VALID[task]) & set(PLANS))
        made = None
        for _ in range(ATTEMPTS):
            plans = [plan for plan in PLANS[chance.choice(kinds)] if (plan in UNSEEN_PLANS) == unseen]
            made = game(package, task, chance.choice(plans), chance)
            if made is not None:
                break
        assert made is not None, f"no room for a game of {task}"
        yield made


def installed() -> Package:
    """The package's parts."""
    import_package()
    import alfworld.gen
    import alfworld.gen.constants as constants
    from alfworld.gen import goal_library
    from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH

    return Package(
        constants=constants,
        goals=goal_library.gdict,
        layouts=Path(alfworld.gen.__file__).parent / "layouts",
        domain=Path(ALFRED_PDDL_PATH).read_text(),
        grammar=Path(ALFRED_TWL2_PATH).read_text(),
    )


def game(package: Package, task: str, plan: int, chance: random.Random) -> Game | None:
    """A game of this type in this room; None where the room has no place for one."""
    here = furnished(package, plan, chance)
    wanted = wanted_pair(package, task, here, chance)
    lit = here.lamp if task == "look_at_obj_in_light" else None
    if wanted is None or (task == "look_at_obj_in_light" and lit is None):
        return None
    thing, target = wanted
    items = placed(package, task, here, thing, target, chance)
    if items is None:
        return None
    goal = package.goals[task]
    pddl = problem(package.constants, Room(here.receptacles, items), goal["pddl"], thing, target, lit, chance)
    names = {"obj": thing.lower(), "recep": target.lower(), "toggle": (lit or "").lower(), "mrecep": ""}
    words = chance.choice(goal["templates"]).format(**names)
    parameters = {
        "object_target": thing,
        "parent_target": "" if lit else target,
        "toggle_target": lit or "",
        "mrecep_target": "",
        "object_sliced": False,
    }
    scene = {"floor_plan": f"FloorPlan{plan}", "scene_num": plan}
    return Game(
        name=f"{task}-{thing}-None-{lit or target}-{plan}",
        trajectory={"task_type": task, "scene": scene, "pddl_params": parameters, "turk_annotations": {"anns": []}},
        game={
            "pddl_domain": package.domain,
            "grammar": package.grammar.replace("UNKNOWN GOAL", words),
            "pddl_problem": pddl,
            "solvable": True,
            "walkthrough": [],
        },
    )


class Furnished(NamedTuple):
    """A room's receptacles, the small things that its floor plan has, and its lamp."""

    receptacles: tuple[Receptacle, ...]
    things: tuple[str, ...]
    lamp: str | None


def furnished(package: Package, plan: int, chance: random.Random) -> Furnished:
    """The floor plan's receptacles: those that open as they stand, of others a few of each kind."""
    constants = package.constants
    present = set(json.loads((package.layouts / f"FloorPlan{plan}-objects.json").read_text()))
    opening = sorted(json.loads((package.layouts / f"FloorPlan{plan}-openable.json").read_text()))
    fixed = set(constants.RECEPTACLES) - constants.MOVABLE_RECEPTACLES_SET
    by_kind: dict[str, list[str]] = {}
    for identifier in opening:
        by_kind.setdefault(identifier.split("|")[0], []).append(identifier)
    for kind in sorted(present & fixed - set(by_kind)):
        number = chance.randint(*NUMBERS.get(kind, (1, 1)))
        by_kind[kind] = [Item.identifier_of(kind, chance) for _ in range(number)]
    receptacles = tuple(
        Receptacle(identifier, kind, kind in constants.OPENABLE_CLASS_SET)
        for kind, identifiers in by_kind.items()
        if kind in fixed
        for identifier in chance.sample(identifiers, min(len(identifiers), MOST_OF_A_KIND))
    )
    small = sorted(present & set(constants.OBJECTS) - fixed)
    things = tuple(thing for thing in small if thing not in LAMPS and places(package, thing, receptacles))
    return Furnished(receptacles, things, next((lamp for lamp in LAMPS if lamp in present), None))


def places(package: Package, thing: str, receptacles: Sequence[Receptacle]) -> list[Receptacle]:
    """Receptacles where such a thing may lie."""
    may_hold = package.constants.VAL_RECEPTACLE_OBJECTS
    return [receptacle for receptacle in receptacles if thing in may_hold.get(receptacle.kind, ())]


def wanted_pair(package: Package, task: str, here: Furnished, chance: random.Random) -> tuple[str, str] | None:
    """Which thing is asked for, and where it has to end."""
    treated, appliance = TREATMENT.get(task, (None, None))
    kinds = {receptacle.kind for receptacle in here.receptacles}
    if appliance is not None and appliance not in kinds:
        return None
    suitable = set(here.things) if treated is None else set(package.constants.VAL_ACTION_OBJECTS[treated])
    pairs = sorted(
        {
            (thing, receptacle.kind)
            for thing in here.things
            if thing in suitable - NEVER_WANTED
            for receptacle in places(package, thing, here.receptacles)
            if receptacle.kind != appliance
        }
    )
    return chance.choice(pairs) if pairs else None


def placed(
    package: Package, task: str, here: Furnished, thing: str, target: str, chance: random.Random
) -> tuple[Item, ...] | None:
    """Things in their places; None where one that is asked for has none but its goal."""
    number = chance.randint(2, 3) if task == "pick_two_obj_and_place" else chance.randint(1, 3)
    others = [other for other in here.things if other != thing]
    chosen = chance.sample(others, min(MOST_OTHER_THINGS, len(others)))
    kinds = [thing] * number + [other for other in chosen for _ in range(chance.randint(1, 2))]
    items = []
    for kind in kinds:
        free = [p for p in places(package, kind, here.receptacles) if not (kind == thing and p.kind == target)]
        if not free:
            return None
        items.append(Item(Item.identifier_of(kind, chance), kind, chance.choice(free)))
    if task == "look_at_obj_in_light" and here.lamp is not None:
        tables = [receptacle for receptacle in here.receptacles if receptacle.kind in LAMP_PLACES]
        if not tables:
            return None
        items.append(Item(Item.identifier_of(here.lamp, chance), here.lamp, chance.choice(tables)))
    return tuple(items)
