"""Good actions in TextWorldExpress games: the gold path, and the way back to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import lru_cache

from sorl_lightning.rollout.environments.textworld_games import GameKey
from sorl_lightning.rollout.environments.textworld_java import UnplayableGameError
from sorl_lightning.rollout.environments.textworld_simulator import agent_path, state_after

# Situations looked at, off the gold path, in each of two searches; some tens of milliseconds.
SEARCHED_SITUATIONS = 60

Actions = tuple[str, ...]


@lru_cache(maxsize=16_384)
def gold_path(key: GameKey) -> Actions | None:
    """Actions that solve the game, checked by playing them; None for a seed that has none.

    The package's agent first looks around, which shows what the opening observation has shown already: left out.
    """
    try:
        path = agent_path(key)
    except UnplayableGameError:
        return None
    if path is None:
        return None
    return solved(key, path[1:] if path[:1] == ("look around",) else path)


def solved(key: GameKey, path: Actions) -> Actions | None:
    """``path`` up to the action that solves the game (in twc the agent walks on); None if none does."""
    for taken, action in enumerate(path):
        state = state_after(key, path[:taken])
        if state.over or action not in state.admissible:
            return None
        if state_after(key, path[: taken + 1]).success:
            return path[: taken + 1]
    return None


@lru_cache(maxsize=16_384)
def expert_action(key: GameKey, actions: Actions) -> str:
    """The gold action after ``actions``; off the gold path, the first action of a way to success that was played out.

    Raises:
        LookupError: the game is over, or no way to success was found nearby.
    """
    gold = gold_path(key)
    if gold is None or state_after(key, actions).over:
        raise LookupError(f"{key}: no expert action, the game is over or has no gold path")
    if gold[: len(actions)] == actions:
        return gold[len(actions)]
    # Walking alone leads back from a wrong turn, through more rooms than could be searched with every drawer in them.
    for walking in (True, False):
        for detour in nearby(key, actions, walking):
            rest = joined(key, actions + detour, gold)
            if rest:
                return (detour + rest)[0]
    raise LookupError(f"{key}: no way back to the gold path was found after {actions}")


def nearby(key: GameKey, actions: Actions, walking: bool) -> Iterator[Actions]:
    """Detours from here, breadth first, each ending in a situation that no earlier one has reached.

    Args:
        walking: only through rooms and their doors.
    """
    queue: deque[Actions] = deque([()])
    seen = {state_after(key, actions).situation}
    while queue:
        detour = queue.popleft()
        yield detour
        for action in state_after(key, actions + detour).admissible:
            if len(seen) >= SEARCHED_SITUATIONS:
                break
            if walking and not action.startswith(("move ", "open door ")):
                continue
            state = state_after(key, (*actions, *detour, action))
            if state.situation not in seen and not state.failure:
                seen.add(state.situation)
                queue.append((*detour, action))


def joined(key: GameKey, actions: Actions, gold: Actions) -> Actions:
    """The shortest rest of the gold path that solves the game from here; () if none does.

    Gold actions that are not admissible here (taking what is already carried) would do nothing, and are left out.
    """
    for start in range(len(gold) - 1, -1, -1):
        played: Actions = ()
        for action in gold[start:]:
            state = state_after(key, actions + played)
            if not state.over and action in state.admissible:
                played = (*played, action)
        if played and state_after(key, actions + played).success:
            return played
    return ()
