"""Good actions in TextWorldExpress games: the gold path, and the way back to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import lru_cache

from sorl_lightning.rollout.environments.textworld_games import GameKey
from sorl_lightning.rollout.environments.textworld_simulator import UnplayableGameError, agent_path, state_after

# States looked at, off the gold path, before the expert gives up; some tens of milliseconds.
SEARCHED_STATES = 60

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
    if path is not None and path[:1] == ("look around",):
        path = path[1:]
    return path if path and solves(key, path) else None


def solves(key: GameKey, path: Actions) -> bool:
    """Whether ``path`` is admissible step by step and solves the game with its last action, not before."""
    for taken, action in enumerate(path):
        state = state_after(key, path[:taken])
        if state.over or action not in state.admissible:
            return False
    return state_after(key, path).success


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
    for detour in nearby(key, actions):
        rest = joined(key, actions + detour, gold)
        if rest:
            return (detour + rest)[0]
    raise LookupError(f"{key}: no way back to the gold path was found after {actions}")


def nearby(key: GameKey, actions: Actions) -> Iterator[Actions]:
    """Detours from here, breadth first, each ending in a situation that no earlier one has reached."""
    queue: deque[Actions] = deque([()])
    seen = {state_after(key, actions).situation}
    while queue:
        detour = queue.popleft()
        yield detour
        for action in state_after(key, actions + detour).admissible:
            if len(seen) >= SEARCHED_STATES:
                break
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
