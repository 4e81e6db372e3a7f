"""TextWorldExpress games as pure functions: (game, actions so far) -> state, played in Java and remembered.

Games are deterministic, so a state is a function of the actions that led to it. Siblings of a group visit the same
states again and again, and a round trip to Java costs more than the game: most steps are answered from memory.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from functools import lru_cache
from sys import intern
from typing import Any, NamedTuple

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.environments import jvm
from sorl_lightning.rollout.environments.textworld_games import GameKey

# Some 1 kB each.
REMEMBERED_STATES = 65_536
# Games kept in Java at their latest state, so that a step that is not remembered need not replay the whole episode.
LIVE_GAMES = 256
GOLD_ATTEMPTS = 10


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


class UnplayableGameError(LookupError):
    """This seed makes no game (the generator gave up)."""


@lru_cache(maxsize=REMEMBERED_STATES)
def state_after(key: GameKey, actions: tuple[str, ...]) -> GameState:
    """The state that ``actions``, each admissible where it is taken, lead to.

    Raises:
        UnplayableGameError: the generator cannot make this game.
        ConfigurationError: the game refuses its parameters, or Java or the package is missing.
    """
    with _lock:
        return parse_state(_simulator().play(key, actions))


@lru_cache(maxsize=4096)
def task_description(key: GameKey) -> str:
    """What the game asks for, in its own words."""
    with _lock:
        simulator = _simulator()
        simulator.play(key, ())
        return str(simulator.interface(key).java.getTaskDescription())


def agent_path(key: GameKey) -> tuple[str, ...] | None:
    """The actions of the package's own agent; None if it does not get there.

    For coin and twc that agent explores at random, and the package draws its walk from an unseeded generator, so that
    the path (and any filter on its length) would differ between runs. Here the walk is seeded by the game.
    """
    with _lock:
        return _simulator().agent_path(key)


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


class Simulator:
    """Games inside one JVM: a generator for each game and parameters, and the games it has made.

    Every attribute looked up in Java is a round trip, so what does not change is looked up once.
    """

    def __init__(self, machine: jvm.JavaVirtualMachine) -> None:
        self.machine = machine
        self.interfaces: dict[tuple[str, str], Interface] = {}
        self.live: OrderedDict[tuple[GameKey, tuple[str, ...]], Any] = OrderedDict()

    def interface(self, key: GameKey) -> Interface:
        """The interface for this game and parameters."""
        name = (key.game, key.parameters)
        if name not in self.interfaces:
            self.interfaces[name] = Interface(self.machine.classes, *name)
        return self.interfaces[name]

    def play(self, key: GameKey, actions: tuple[str, ...]) -> str:
        """The package's answer to the last of ``actions``, from the live game that is nearest before it."""
        interface = self.interface(key)
        known = next((n for n in range(len(actions) - 1, -1, -1) if (key, actions[:n]) in self.live), None)
        if known is None:
            answer, known = interface.new_game(key), 0
        else:
            interface.resume(self.live.pop((key, actions[:known])))
        for action in actions[known:]:
            answer = interface.step(action)
        self.live[key, actions] = interface.game
        if len(self.live) > LIVE_GAMES:
            self.live.popitem(last=False)
        return answer

    def agent_path(self, key: GameKey) -> tuple[str, ...] | None:
        """See the function of this name."""
        interface = self.interface(key)
        for attempt in range(GOLD_ATTEMPTS):
            interface.new_game(key)
            path = interface.agent_path(seed=key.seed + attempt * 1_000_003)
            if path is not None:
                return path
        return None


class Interface:
    """The package's interface to one game under one set of parameters; it holds one game at a time.

    Attributes:
        game: the Java object of that game, which stays as it is while another is played.
    """

    def __init__(self, classes: Any, game: str, parameters: str) -> None:
        self.java = classes.textworldexpress.runtime.PythonInterface()
        refusal = self.java.load(game, parameters)
        if refusal:
            raise ConfigurationError(f"parameters {parameters!r} of {game!r}: {refusal.strip()}")
        self.game: Any = None
        self._agents = classes.textworldexpress.goldagent
        self._agent: Any = None
        self._random = classes.scala.util.Random

    def new_game(self, key: GameKey) -> str:
        """Make the game; the package's opening answer."""
        try:
            answer = str(self.java.generateNewGameJSON(key.seed, key.fold, False))
        except jvm.import_py4j().Py4JJavaError as error:
            reason = error.java_exception.getMessage()
            raise UnplayableGameError(f"{key.game} {key.fold} {key.seed}: {reason}") from error
        self.game = self.java.game()
        return answer

    def resume(self, game: Any) -> None:
        """Go on with a game made earlier."""
        if game is not self.game:
            getattr(self.java, "game_$eq")(game)
            self.game = game

    def step(self, action: str) -> str:
        """The package's answer to ``action``."""
        return str(self.java.stepJSON(action))

    def agent_path(self, seed: int) -> tuple[str, ...] | None:
        """Let the package's agent play the present game, to its end; None if it gets lost."""
        if self._agent is None:
            # CoinGame is played by CoinGoldAgent, and so on.
            name = self.game.getClass().getSimpleName().removesuffix("Game") + "GoldAgent"
            self._agent = getattr(self._agents, name)
        found = self._agent(self.game).mkGoldPath(self._random(seed))
        if not found._1():
            return None
        # A Java list prints as "[look around, take coin]": one round trip instead of one an action.
        getattr(self.java, "goldPath_$eq")(found._2())
        text = self.java.getGoldActionSequence().toString()
        return tuple(text[1:-1].split(", "))[1:]  # the first is the opening of the game, not an action


_lock = threading.RLock()
_current: Simulator | None = None


def _simulator() -> Simulator:
    global _current
    try:
        from textworld_express.constants import BASEPATH, JAR_PATH
    except ImportError as error:
        raise ConfigurationError(f"textworld-express is not installed; install the extra: {jvm.EXTRA}") from error
    machine = jvm.running_jvm((JAR_PATH,), BASEPATH)
    if _current is None or _current.machine is not machine:
        _current = Simulator(machine)
    return _current
