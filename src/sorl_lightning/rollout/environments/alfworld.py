"""ALFWorld: household chores in text, over the rooms of ALFRED (Shridhar et al. 2021, arXiv:2010.03768).

Worked example:

    user        -= Welcome to TextWorld, ALFRED! =-

                You are in the middle of a room. Looking quickly around you, you see a bed 1, a desk 1, ...

                Your task is to: examine the alarmclock with the desklamp.
    assistant   go to dresser 1
    user        You arrive at dresser 1. On the dresser 1, you see a alarmclock 1, and a desklamp 1.
    assistant   use desklamp 1
    assistant   take alarmclock 1 from dresser 1          reward 1, terminated, success
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.environments import alfworld_simulator as simulator
from sorl_lightning.rollout.environments.alfworld_games import FOLDERS, TASK_TYPES, data_folder, games_of
from sorl_lightning.rollout.environments.alfworld_simulator import GameKey
from sorl_lightning.rollout.environments.text_game import Scene, TextGame
from sorl_lightning.types import Task


class AlfWorld(TextGame):
    """ALFWorld's text games. Needs the extra ``pip install 'sorl-lightning[alfworld]'``, parts of which are GPL.

    Validation is the package's ``valid_seen`` (rooms of the train split), test its ``valid_unseen``.

    Args:
        data: folder with json_2.1.1 in it; None is the one that ALFWORLD_DATA names. ``sorl data alfworld FOLDER``
            makes one.
        task_types: of the six types those to play, by name; None takes all.
        max_tasks: the first so many games of each split; None takes all.
        expert: "planner", which sees everything and solves every game, or "handcoded", the package's policy that
            searches as an agent has to, and fails on most games with two objects.
        max_steps: steps after which an episode is truncated; the package's own limit is 50.
        invalid_penalty: taken off the reward of an action that is not understood.
        action_tags: the policy thinks first and writes its action within <action> tags; the expert writes them too.
        show_admissible: append the admissible actions to every observation, as verl-agent does.

    Step info: as ``TextGame``'s; the score is 1 for a solved task.
    """

    example_action = "go to desk 1"

    def __init__(
        self,
        data: str | None = None,
        task_types: Sequence[str] | None = None,
        max_tasks: int | None = None,
        expert: Literal["planner", "handcoded"] = "planner",
        max_steps: int | None = 50,
        invalid_penalty: float = 0.0,
        action_tags: bool = False,
        show_admissible: bool = False,
    ) -> None:
        super().__init__(max_steps, "score", invalid_penalty, action_tags, show_admissible)
        unknown = sorted(set(task_types or ()) - set(TASK_TYPES))
        if unknown:
            raise ConfigurationError(f"task_types has {', '.join(unknown)}, ALFWorld's are: {', '.join(TASK_TYPES)}")
        if expert not in ("planner", "handcoded"):
            raise ConfigurationError(f"expert is {expert!r}, it can be one of: planner, handcoded")
        self.data = data
        self.task_types = task_types
        self.max_tasks = max_tasks
        self.expert = expert

    def tasks(self, split: str) -> Sequence[Task]:
        """The split's games, types of task in turns; ids are their folders."""
        if split not in FOLDERS:
            raise ConfigurationError(f"split is {split!r}, it can be one of: {', '.join(FOLDERS)}")
        simulator.import_package()  # a missing extra is named now
        types = TASK_TYPES if self.task_types is None else tuple(self.task_types)
        games = games_of(data_folder(self.data), split, types)[: self.max_tasks]
        return [Task(id=f"{FOLDERS[split]}/{game.name}", payload=game.path) for game in games]

    def begin(self, task: Task) -> Scene:
        self._key = GameKey(task.payload, self.expert == "handcoded")
        self._actions: tuple[str, ...] = ()
        self._plan: tuple[str, ...] = ()
        self._state = simulator.state_after(self._key, ())
        return Scene(self._state.observation)

    def act(self, action: str) -> Scene | None:
        action = action.lower()
        if action not in self._state.admissible:
            return None
        self._actions = (*self._actions, action)
        self._plan = self._plan[1:] if self._plan[:1] == (action,) else ()
        self._state = simulator.state_after(self._key, self._actions)
        won = self._state.won
        return Scene(self._state.observation, float(won), success=won, over=won)

    def refusal(self, action: str) -> str:
        return "Nothing happens."

    def understood(self) -> tuple[str, ...]:
        return self._state.admissible

    def gold_action(self) -> str:
        if self.expert == "handcoded":
            return self._state.handcoded or "look"
        # A plan is followed to its end: planning anew after every step can go back and forth between equal plans.
        self._plan = self._plan or simulator.plan_after(self._key, self._actions)
        if not self._plan:
            raise LookupError(f"the planner finds no way to the goal of {self._key.path}")
        return self._plan[0]
