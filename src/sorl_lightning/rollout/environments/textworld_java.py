"""TextWorldExpress inside the Java virtual machine. Every call is a round trip of some 0.1 ms, so calls are few."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.environments import jvm
from sorl_lightning.rollout.environments.textworld_games import GameKey

# Games kept at their latest state, so that a step that is not remembered need not replay the whole episode.
LIVE_GAMES = 256
AGENT_ATTEMPTS = 10


class UnplayableGameError(LookupError):
    """This seed makes no game (the generator gave up)."""


class JavaGames:
    """All games of one JVM.

    Attributes:
        live: by game and actions so far, the package's interface that plays it; the one used longest ago first.
    """

    def __init__(self, machine: jvm.JavaVirtualMachine) -> None:
        self.machine = machine
        self.live: OrderedDict[tuple[GameKey, tuple[str, ...]], Any] = OrderedDict()
        self._generators: dict[tuple[str, str], Generator] = {}

    def _generator(self, key: GameKey) -> Generator:
        name = (key.game, key.parameters)
        if name not in self._generators:
            self._generators[name] = Generator(self.machine.classes, *name)
        return self._generators[name]

    def play(self, key: GameKey, actions: tuple[str, ...]) -> str:
        """The package's answer (JSON) to the last of ``actions``, from the live game that is nearest before it.

        Raises:
            UnplayableGameError: the generator cannot make this game.
        """
        known = next((n for n in range(len(actions) - 1, -1, -1) if (key, actions[:n]) in self.live), None)
        if known is None:
            interface, answer = self._generator(key).new_game(key)
            known = 0
        else:
            interface = self.live.pop((key, actions[:known]))
        for action in actions[known:]:
            answer = interface.stepJSON(action)
        self.live[key, actions] = interface
        if len(self.live) > LIVE_GAMES:
            jvm.release(self.live.popitem(last=False)[1])
        return str(answer)

    def task_description(self, key: GameKey) -> str:
        """What the game asks for."""
        interface, _ = self._generator(key).new_game(key)
        description = str(interface.getTaskDescription())
        jvm.release(interface)
        return description

    def agent_path(self, key: GameKey) -> tuple[str, ...] | None:
        """The actions of the package's agent, whose walk is seeded by the game; None if it gets lost every time."""
        for attempt in range(AGENT_ATTEMPTS):
            path = self._generator(key).agent_path(key, seed=key.seed + attempt * 1_000_003)
            if path is not None:
                return path
        return None


class Generator:
    """Makes games under one set of parameters, which take the package 5 to 20 ms to load."""

    def __init__(self, classes: Any, game: str, parameters: str) -> None:
        self._new_interface = classes.textworldexpress.runtime.PythonInterface
        loaded = self._new_interface()
        refusal = loaded.load(game, parameters)
        if refusal:
            raise ConfigurationError(f"parameters {parameters!r} of {game!r}: {refusal.strip()}")
        self._generator = loaded.gameGenerator()
        jvm.release(loaded)
        self._agents = classes.textworldexpress.goldagent
        self._agent: Any = None
        self._random = classes.scala.util.Random

    def new_game(self, key: GameKey) -> tuple[Any, str]:
        """An interface that plays this game alone, and the package's opening answer."""
        interface = self._new_interface()
        getattr(interface, "gameGenerator_$eq")(self._generator)
        try:
            return interface, str(interface.generateNewGameJSON(key.seed, key.fold, False))
        except jvm.import_py4j().Py4JJavaError as error:
            reason = error.java_exception.getMessage()
            jvm.release(error.java_exception, interface)
            raise UnplayableGameError(f"{key.game} {key.fold} {key.seed}: {reason}") from error

    def agent_path(self, key: GameKey, seed: int) -> tuple[str, ...] | None:
        """Let the package's agent play a new game to its end, with chance seeded; None if it gets lost."""
        interface, _ = self.new_game(key)
        game = interface.game()
        if self._agent is None:
            # CoinGame is played by CoinGoldAgent, and so on.
            name = game.getClass().getSimpleName().removesuffix("Game") + "GoldAgent"
            self._agent = getattr(self._agents, name)
        walk = self._random(seed)
        agent = self._agent(game)
        found = agent.mkGoldPath(walk)
        path = self._path_of(interface, found) if found._1() else None
        jvm.release(interface, game, walk, agent, found)
        return path

    def _path_of(self, interface: Any, found: Any) -> tuple[str, ...]:
        actions = found._2()
        getattr(interface, "goldPath_$eq")(actions)
        listed = interface.getGoldActionSequence()
        # A Java list prints as "[look around, take coin]": one round trip instead of one an action.
        text = listed.toString()
        jvm.release(actions, listed)
        return tuple(text[1:-1].split(", "))[1:]  # the first is the opening of the game, not an action
