"""An expert for the coin game who knows no more than the agent: it goes to the nearest room not seen yet."""

from __future__ import annotations

import re
from collections import deque
from functools import lru_cache

from sorl_lightning.rollout.environments.textworld_games import GameKey
from sorl_lightning.rollout.environments.textworld_simulator import state_after
from sorl_lightning.rollout.environments.textworld_text import condensed

ROOM = re.compile(r"You are in the ([^.]+)\.")
EXIT = re.compile(r"\b(north|south|east|west): ([^.]+)\.")

Exits = dict[str, str]


@lru_cache(maxsize=65_536)
def explorer_action(key: GameKey, actions: tuple[str, ...]) -> str:
    """Take the coin where it is; else the first step to where it was seen, or to the nearest room not entered yet.

    Of rooms equally near, the first exit in the room's own order is taken. A game without doors only.

    Raises:
        LookupError: the game is over, or every room has been seen.
    """
    state = state_after(key, actions)
    if state.over:
        raise LookupError(f"{key}: no expert action, the game is over")
    if "take coin" in state.admissible:
        return "take coin"
    states = [state_after(key, actions[:taken]) for taken in range(len(actions) + 1)]
    seen = dict(room_and_exits(visited.situation[0]) for visited in states)
    coin = {room_and_exits(v.situation[0])[0] for v in states if "take coin" in v.admissible}
    here, _ = room_and_exits(state.situation[0])
    queue: deque[tuple[str, str]] = deque(seen[here].items())
    reached = {here}
    while queue:
        first, room = queue.popleft()
        if room in coin or (not coin and room not in seen):
            return f"move {first}"
        if room in seen and room not in reached:
            reached.add(room)
            queue.extend((first, beyond) for beyond in seen[room].values())
    raise LookupError(f"{key}: every room has been seen after {actions}, and none has the coin")


def room_and_exits(look: str) -> tuple[str, Exits]:
    """What the game's description of a room says of its place.

    >>> room_and_exits("You are in the pantry. You also see a shelf. To the South you see the kitchen.")
    ('pantry', {'south': 'kitchen'})
    """
    text = condensed(look)
    room = ROOM.search(text)
    if room is None:
        raise LookupError(f"this describes no room: {look!r}")
    return room[1], dict(EXIT.findall(text))
