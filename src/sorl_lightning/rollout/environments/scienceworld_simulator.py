"""ScienceWorld games as functions of (variation, actions so far), played in Java.

A game is deterministic, so that a state follows from the actions that led to it; siblings share what is remembered.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any, NamedTuple

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.environments import jvm
from sorl_lightning.rollout.environments.live_games import LiveGames

EXTRA = "pip install 'sorl-lightning[scienceworld]'"
UNKNOWN_ACTION = "No known action matches that input."
ELECTRICAL = ("power-component", "conductivity")
WITHOUT_ELECTRICITY = "noElectricalAction"
HEAP = 2048  # MiB; a live game takes some 2
LOOK = "look around"


class VariationKey(NamedTuple):
    """Which game: the task's name, the number of its variation, and the simplifications asked for."""

    name: str
    variation: int
    simplifications: str


class GameState(NamedTuple):
    """The game's answer to the last action, its score (-1 for a lost game), and whether it is over."""

    observation: str
    score: float
    over: bool


class _Game:
    """One running game in Java."""

    def __init__(self, key: VariationKey) -> None:
        self.interface = loaded(key)
        self.interface.reset()
        self.state = GameState("", 0.0, False)
        self.play(LOOK)  # as the package's own reset does

    def play(self, action: str) -> None:
        observation = str(self.interface.step(action))
        score = round(float(self.interface.getScore()), 2)  # the package counts whole points of 100
        self.state = GameState(observation, score, bool(self.interface.getCompleted()) or score < 0)

    def end(self) -> None:
        jvm.release(self.interface)


_start = threading.Lock()
# The package keeps state in Scala objects that all its games share: two that step at once disturb each other.
_playing = threading.RLock()
_pool: tuple[jvm.JavaVirtualMachine, LiveGames[VariationKey, _Game]] | None = None


@lru_cache(maxsize=65_536)
def state_after(key: VariationKey, actions: tuple[str, ...]) -> GameState:
    """The state that ``actions`` lead to."""
    with _playing, _live_games().after(key, actions) as game:
        return game.state


@lru_cache(maxsize=1024)
def understood(key: VariationKey, actions: tuple[str, ...]) -> tuple[str, ...]:
    """Actions that the game understands there, sorted."""
    with _playing, _live_games().after(key, actions) as game:
        return tuple(sorted({str(action) for action in game.interface.getValidActionObjectCombinations()}))


@lru_cache(maxsize=16_384)
def gold_path(key: VariationKey) -> tuple[str, ...]:
    """Actions that take the score to 1."""
    interface = loaded(key, gold=True)
    path = tuple(str(action) for action in interface.getGoldActionSequence())
    jvm.release(interface)
    return path


@lru_cache(maxsize=16_384)
def task_description(key: VariationKey) -> str:
    """What the game asks for, in its own words."""
    with _playing, _live_games().after(key, ()) as game:
        return str(game.interface.getTaskDescription())


@lru_cache(maxsize=128)
def variations(name: str, of: str) -> tuple[int, ...]:
    """Numbers of the task's variations in the package's set ``of``: Train, Dev or Test."""
    interface = loaded(VariationKey(name, 0, ""))
    found = tuple(int(number) for number in getattr(interface, f"getVariations{of}")())
    jvm.release(interface)
    return found


def task_names() -> list[str]:
    """The package's tasks."""
    return sorted(_package().constants.ID2TASK.values())


def check_simplifications(simplifications: str) -> None:
    """Refuse names that the package does not know.

    Raises:
        ConfigurationError: naming them.
    """
    interface = _machine().classes.scienceworld.runtime.pythonapi.PythonInterface()
    known = ["easy", *str(interface.getPossibleSimplifications()).split(", ")]
    jvm.release(interface)
    for name in filter(None, simplifications.split(",")):
        if name not in known:
            raise ConfigurationError(f"simplifications has {name!r}, ScienceWorld's are: {', '.join(known)}")


def loaded(key: VariationKey, gold: bool = False) -> Any:
    """A new interface with this variation in it."""
    with _playing:
        return _loaded(key, gold)


def _loaded(key: VariationKey, gold: bool) -> Any:
    interface = _machine().classes.scienceworld.runtime.pythonapi.PythonInterface()
    names = [name for name in key.simplifications.split(",") if name]
    if any(part in key.name for part in ELECTRICAL):
        names = [name for name in names if name != WITHOUT_ELECTRICITY]
    interface.load(key.name, key.variation, ",".join(names), gold)
    return interface


def close() -> None:
    """End the JVM, and its games with it."""
    global _pool
    with _start:
        _pool = None
        jvm.close_jvm((_package().constants.JAR_PATH,))


def _live_games() -> LiveGames[VariationKey, _Game]:
    global _pool
    machine = _machine()
    with _start:
        if _pool is None or _pool[0] is not machine:
            _pool = (machine, LiveGames(_Game, _Game.play, _Game.end))
        return _pool[1]


def _machine() -> jvm.JavaVirtualMachine:
    constants = _package().constants
    with _start:
        return jvm.running_jvm((constants.JAR_PATH,), constants.BASEPATH, HEAP)


def _package() -> Any:
    try:
        import scienceworld.constants
    except ImportError as error:
        raise ConfigurationError(f"scienceworld is not installed; install the extra: {EXTRA}") from error
    return scienceworld
