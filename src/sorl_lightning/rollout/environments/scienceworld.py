"""ScienceWorld: elementary-school science in a house of ten rooms (Wang et al. 2022, arXiv:2203.07540).

Worked example, task "find-living-thing", variation 0:

    user        Your task is to find a(n) living thing. First, focus on the thing. Then, move it to the red box ...
    assistant   go to greenhouse          score 0.17
    assistant   focus on butterfly        score 0.67
    ...
    assistant   move egg butterfly egg in inventory to red box          score 1, terminated, success
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.environments import scienceworld_simulator as simulator
from sorl_lightning.rollout.environments.scienceworld_simulator import VariationKey
from sorl_lightning.rollout.environments.text_game import Scene, TextGame
from sorl_lightning.types import Task

SETS = {"train": "Train", "validation": "Dev", "test": "Test"}
# Longer texts are no action of the game, and its parser takes long over them.
LONGEST_ACTION = 200


class ScienceWorld(TextGame):
    """ScienceWorld's tasks in their published train, dev and test variations.

    All games of a process share one JVM. Needs the extra: ``pip install 'sorl-lightning[scienceworld]'``.

    Args:
        names: tasks of the package, such as "boil" or "find-living-thing"; None takes all 30.
        variations: the first so many variations of each task in each split; None takes all 7,207.
        simplifications: of the package, comma-separated, such as "teleportAction,openDoors"; "easy" is all of them
            (without the one that the electrical tasks cannot have), "" none.
        max_steps: steps after which an episode is truncated; the package's own limit is 100.
        reward: "score": what an action adds to the score; a wrong focus takes it to -1 and ends the episode.
            "success": 1 for the action that takes the score to 1.
        invalid_penalty: taken off the reward of an action that is not understood.
        action_tags: the policy thinks first and writes its action within <action> tags; the expert writes them too.
        show_admissible: append the admissible actions, a hundred to a thousand, to every observation. Listing them
            takes longer than a step.

    Step info: as ``TextGame``'s.
    """

    waits = True  # for the JVM
    example_action = "open door to kitchen"

    def __init__(
        self,
        names: Sequence[str] | None = None,
        variations: int | None = None,
        simplifications: str = "easy",
        max_steps: int | None = 100,
        reward: Literal["score", "success"] = "score",
        invalid_penalty: float = 0.0,
        action_tags: bool = False,
        show_admissible: bool = False,
    ) -> None:
        super().__init__(max_steps, reward, invalid_penalty, action_tags, show_admissible)
        if variations is not None and variations < 1:
            raise ConfigurationError(f"variations is {variations}, need at least 1, or null for all")
        self.names = names
        self.variations = variations
        self.simplifications = simplifications

    def tasks(self, split: str) -> Sequence[Task]:
        """The split's variations, first of each task, then the second of each; ids say both ("boil-7")."""
        if split not in SETS:
            raise ConfigurationError(f"split is {split!r}, it can be one of: {', '.join(SETS)}")
        known = simulator.task_names()
        unknown = sorted(set(self.names or ()) - set(known))
        if unknown:
            raise ConfigurationError(f"names has {', '.join(unknown)}, ScienceWorld's tasks are: {', '.join(known)}")
        simulator.check_simplifications(self.simplifications)
        names = known if self.names is None else self.names
        numbered = [
            (place, name, number)
            for name in names
            for place, number in enumerate(simulator.variations(name, SETS[split])[: self.variations])
        ]
        numbered.sort(key=lambda entry: entry[0])  # stable: a prefix of the list has all tasks in it
        return [
            Task(id=f"{name}-{number}", payload=VariationKey(name, number, self.simplifications))
            for _, name, number in numbered
        ]

    def begin(self, task: Task) -> Scene:
        self._key: VariationKey = task.payload
        self._actions: tuple[str, ...] = ()
        state = simulator.state_after(self._key, ())
        return Scene(f"{simulator.task_description(self._key)}\n\n{state.observation}", state.score)

    def act(self, action: str) -> Scene | None:
        action = action.encode("utf-8", errors="replace").decode()
        if not action or len(action) > LONGEST_ACTION:
            return None
        # What the game does not understand takes its time too, so it stays in the history.
        self._actions = (*self._actions, action)
        state = simulator.state_after(self._key, self._actions)
        if state.observation == simulator.UNKNOWN_ACTION:
            return None
        return Scene(state.observation, state.score, success=state.score >= 1, over=state.over)

    def refusal(self, action: str) -> str:
        return simulator.UNKNOWN_ACTION

    def understood(self) -> tuple[str, ...]:
        return simulator.understood(self._key, self._actions)

    def gold_action(self) -> str:
        """The next action of the package's gold path; off the path, its first action that was not taken yet."""
        gold, taken = simulator.gold_path(self._key), 0
        for action in self._actions:
            taken += taken < len(gold) and gold[taken] == action
        if taken == len(gold):
            raise LookupError(f"{self._key} goes on after the end of its gold path")
        return gold[taken]

    def close(self) -> None:
        """End this process's JVM for ScienceWorld; it would start again if a game were played after."""
        simulator.close()
