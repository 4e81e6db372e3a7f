"""TextWorldExpress games as pure functions: (game, actions so far) -> state, played in Java and remembered.

Games are deterministic, so a state is a function of the actions that led to it. Siblings of a group visit the same
states again and again, and a round trip to Java costs more than the game: most steps are answered from memory.
"""

from __future__ import annotations

import json
import threading
from functools import lru_cache
from sys import intern
from typing import NamedTuple

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.environments import jvm
from sorl_lightning.rollout.environments.textworld_games import GameKey
from sorl_lightning.rollout.environments.textworld_java import JavaGames

# Some 1 kB each.
REMEMBERED_STATES = 65_536


class GameState(NamedTuple):
    """A state of a game.

    Attributes:
        observation: the game's answer to the last action, as the game wrote it.
        admissible: actions that the game understands now, sorted; any other leaves the state as it is.
        situation: equal for states in which the agent sees and carries the same; unlike ``observation`` it does not
            depend on the last action.
    """

    observation: str
    admissible: tuple[str, ...]
    score: float
    success: bool
    failure: bool
    situation: tuple[str, str]

    @property
    def over(self) -> bool:
        """Whether the game has been won or lost."""
        return self.success or self.failure


@lru_cache(maxsize=REMEMBERED_STATES)
def state_after(key: GameKey, actions: tuple[str, ...]) -> GameState:
    """The state that ``actions``, each admissible where it is taken, lead to.

    Raises:
        UnplayableGameError: the generator cannot make this game.
        ConfigurationError: the game refuses its parameters, or Java or the package is missing.
    """
    with _lock:
        return parse_state(_java_games().play(key, actions))


@lru_cache(maxsize=4096)
def task_description(key: GameKey) -> str:
    """What the game asks for, in its own words."""
    with _lock:
        return _java_games().task_description(key)


def agent_path(key: GameKey) -> tuple[str, ...] | None:
    """The actions of the package's own agent; None if it does not get there.

    For coin and twc that agent explores at random, and the package draws its walk from an unseeded generator, so that
    the path (and any filter on its length) would differ between runs. Here the walk is seeded by the game.
    """
    with _lock:
        return _java_games().agent_path(key)


def parse_state(answer: str) -> GameState:
    """A state from the package's JSON. Texts recur in thousands of states: they are interned."""
    fields = json.loads(answer)
    return GameState(
        observation=intern(fields["observation"]),
        admissible=tuple(intern(action) for action in sorted(set(fields["validActions"]))),
        score=float(fields["score"]),
        success=fields["tasksuccess"],
        failure=fields["taskfailure"],
        situation=(intern(fields["look"]), intern(fields["inventory"])),
    )


_lock = threading.RLock()
_games: JavaGames | None = None


def _java_games() -> JavaGames:
    global _games
    try:
        from textworld_express.constants import BASEPATH, JAR_PATH
    except ImportError as error:
        raise ConfigurationError(f"textworld-express is not installed; install the extra: {jvm.EXTRA}") from error
    machine = jvm.running_jvm((JAR_PATH,), BASEPATH)
    if _games is None or _games.machine is not machine:
        _games = JavaGames(machine)
    return _games
