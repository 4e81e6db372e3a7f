"""ALFWorld games as functions of (game, actions so far), played by TextWorld's PDDL engine in this process.

The package and what it needs (a planner under the GPL) are imported when a game starts, and not before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.environments.live_games import LiveGames

EXTRA = "pip install 'sorl-lightning[alfworld]'"
REMEMBERED_TRANSLATIONS = 256  # two a game


class GameKey(NamedTuple):
    """Which game: its file, and whether the package's handcoded expert watches it."""

    path: str
    handcoded: bool


class GameState(NamedTuple):
    """The game's answer, the actions it understands, whether it is won, and what the handcoded expert would do."""

    observation: str
    admissible: tuple[str, ...]
    won: bool
    handcoded: str | None


class _Game:
    """One running game."""

    def __init__(self, key: GameKey) -> None:
        textworld, package = import_package()
        self.engine = textworld.envs.PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True))
        self.world = package.AlfredDemangler(self.engine, shuffle=False)
        if key.handcoded:
            self.world = package.AlfredExpert(self.world, expert_type="handcoded")
        self.world.load(key.path)
        self._keep(self.world.reset())

    def play(self, action: str) -> None:
        self._keep(self.world.step(action)[0])

    def _keep(self, state: Any) -> None:
        plan = state.get("extra.expert_plan")
        self.state = GameState(
            observation=state.feedback.strip(),
            admissible=tuple(action for action in state["admissible_commands"] if action != "help"),
            won=bool(state["won"]),
            handcoded=plan[0] if plan else None,
        )

    def end(self) -> None:
        import fast_downward

        fast_downward.close_lib(self.engine.downward_lib)


_live: LiveGames[GameKey, _Game] = LiveGames(_Game, _Game.play, _Game.end)


@lru_cache(maxsize=65_536)
def state_after(key: GameKey, actions: tuple[str, ...]) -> GameState:
    """The state that ``actions``, each admissible where it is taken, lead to."""
    with _live.after(key, actions) as game:
        return game.state


@lru_cache(maxsize=16_384)
def plan_after(key: GameKey, actions: tuple[str, ...]) -> tuple[str, ...]:
    """The planner's actions from there to the goal; () where it finds none."""
    with _live.after(key, actions) as game:
        # The public way, EnvInfos(policy_commands=True), plans anew after every step, a quarter of a second or more.
        return tuple(game.engine._pddl_state.replan(game.engine._entity_infos) or ())


@lru_cache(maxsize=1)
def import_package() -> tuple[Any, Any]:
    """The modules ``textworld`` and ``alfworld.agents.environment.alfred_tw_env``.

    Raises:
        ConfigurationError: they are not installed.
    """
    arguments = list(sys.argv)
    # The package makes the folder that this variable names when it is imported; it is not needed.
    chosen = os.environ.get("ALFWORLD_DATA")
    os.environ.setdefault("ALFWORLD_DATA", os.path.dirname(os.path.abspath(__file__)))
    try:
        import fast_downward
        import textworld
        import textworld.envs
        from alfworld.agents.environment import alfred_tw_env
    except ImportError as error:
        raise ConfigurationError(f"alfworld is not installed; install the extra: {EXTRA}") from error
    finally:
        sys.argv[:] = arguments
        if chosen is None:
            del os.environ["ALFWORLD_DATA"]
    fast_downward.pddl2sas = remembered(fast_downward.pddl2sas)
    return textworld, alfred_tw_env


def remembered(translate: Callable[..., Any]) -> Callable[..., Any]:
    """The planner's translator, which overwrites ``sys.argv`` and is asked four times for each game, as a pure one."""

    @lru_cache(maxsize=REMEMBERED_TRANSLATIONS)
    def pddl2sas(domain: str, problem: str, verbose: bool = False, optimize: bool = False) -> Any:
        arguments = sys.argv
        try:
            return translate(domain, problem, verbose=verbose, optimize=optimize)
        finally:
            sys.argv = arguments

    return pddl2sas
