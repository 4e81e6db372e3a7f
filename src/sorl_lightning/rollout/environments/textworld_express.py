"""TextWorldExpress: short household games in words, thousands of steps a second (Jansen & Cote 2022, arXiv:2208.01174).

Worked example, game "coin" with ``numLocations: 2``:

    user        Your task is to search the environment and find the coin. Once you find the coin, take it.

                You are in the kitchen. stove. oven. closed fridge. counter. dining chair.
                north: corridor.
    assistant   move north
    user        You are in the corridor. shoe cabinet. coin.
                south: kitchen.
    assistant   take coin          reward 1, terminated, success
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NoReturn

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.environment import Environment, Step
from sorl_lightning.rollout.environments import jvm
from sorl_lightning.rollout.environments import textworld_expert as expert
from sorl_lightning.rollout.environments.textworld_explorer import explorer_action
from sorl_lightning.rollout.environments.textworld_games import GameKey, canonical_parameters
from sorl_lightning.rollout.environments.textworld_simulator import state_after, task_description
from sorl_lightning.rollout.environments.textworld_text import condensed, tidy
from sorl_lightning.types import Message, Task

FOLDS = {"train": "train", "validation": "dev", "test": "test"}
# The package's own ranges of its folds; with split_by="seed" they keep the splits apart in the train fold.
FIRST_SEEDS = {"train": 0, "validation": 10_000, "test": 20_000}
SEEDS_PER_SPLIT = 10_000
# Seeds tried before the first task is found; then the filter or the parameters are at fault.
PATIENCE = 500
# The answer of every game to an action that is not admissible, which changes nothing (a test holds the games to it).
UNKNOWN_ACTION = "Unknown action: I'm not sure what you mean."


@dataclass(frozen=True, slots=True)
class GameTask:
    """Payload of a task: the game's fold of objects and its seed."""

    fold: str
    seed: int


class TextWorldExpress(Environment):
    """One game of TextWorldExpress, its tasks checked to be solvable.

    A task of a split is a seed whose gold path was found and played to success. All games of a process share one JVM,
    started by the first call of ``tasks`` or ``reset``. Needs the extra: ``pip install 'sorl-lightning[textworld]'``.

    Args:
        game: coin, twc, mapreader, cookingworld, arithmetic, sorting or simonsays.
        parameters: of the game, as a mapping or as the package writes them ("numLocations=4,includeDoors=0"); those
            left out keep the package's defaults.
        train_tasks: number of tasks of the train split; validation_tasks, test_tasks: likewise.
        skip_seeds: seeds to pass over in each split, so that another run can have tasks of its own.
        split_by: "fold": validation and test are the package's dev and test folds, whose objects may be other words
            (in twc all are); "seed": they are other seeds of the train fold.
        min_gold: fewest actions of the gold path.
        max_gold: most actions of the gold path; None for any.
        max_steps: steps after which an episode is truncated; None leaves that to the collector's turn limit.
        reward: "score": what an action adds to the game's score, which is 1 at success (a lost game may take it to
            -1); "success": 1 for the action that solves the task.
        show_admissible: append the admissible actions to every observation.
        condense: leave out the game's filler words ("In one part of the room you see a").
        expert: who answers ``expert_action``. "gold": the package's own agent, whose walk through coin and twc is a
            random one, and the way back to it; "explorer", for coin without doors: goes to the nearest room not seen
            yet, from wherever it is.

    Step info: "success"; "valid", whether the action was admissible, 1.0 or 0.0; "valid_fraction", its mean over the
    episode so far; "score".
    """

    def __init__(
        self,
        game: str = "coin",
        parameters: dict[str, int] | str | None = None,
        train_tasks: int = 500,
        validation_tasks: int = 100,
        test_tasks: int = 100,
        skip_seeds: int = 0,
        split_by: Literal["fold", "seed"] = "fold",
        min_gold: int = 1,
        max_gold: int | None = None,
        max_steps: int | None = None,
        reward: Literal["score", "success"] = "score",
        show_admissible: bool = False,
        condense: bool = True,
        expert: Literal["gold", "explorer"] = "gold",
    ) -> None:
        self.game = game
        self.parameters = parameters
        self.train_tasks = train_tasks
        self.validation_tasks = validation_tasks
        self.test_tasks = test_tasks
        self.skip_seeds = skip_seeds
        self.split_by = split_by
        self.min_gold = min_gold
        self.max_gold = max_gold
        self.max_steps = max_steps
        self.reward = reward
        self.show_admissible = show_admissible
        self.condense = condense
        self.expert = expert
        self._parameters = canonical_parameters(game, parameters)
        self._check_settings()

    def _check_settings(self) -> None:
        for name, value, allowed in (
            ("split_by", self.split_by, ("fold", "seed")),
            ("reward", self.reward, ("score", "success")),
            ("expert", self.expert, ("gold", "explorer")),
        ):
            if value not in allowed:
                raise ConfigurationError(f"{name} is {value!r}, it can be one of: {', '.join(allowed)}")
        if self.expert == "explorer" and (self.game != "coin" or "includeDoors=0" not in self._parameters):
            raise ConfigurationError(
                f"expert is 'explorer', which plays coin with includeDoors: 0, and this is {self.game} "
                f"({self._parameters or 'defaults'})"
            )
        for count in ("train_tasks", "validation_tasks", "test_tasks", "min_gold"):
            if getattr(self, count) < 0:
                raise ConfigurationError(f"{count} is {getattr(self, count)}, it must be 0 or more")
        if self.max_steps is not None and self.max_steps < 1:
            raise ConfigurationError(f"max_steps is {self.max_steps}, it must be at least 1")
        if not 0 <= self.skip_seeds < SEEDS_PER_SPLIT:
            raise ConfigurationError(f"skip_seeds is {self.skip_seeds}, need 0 <= skip_seeds < {SEEDS_PER_SPLIT}")
        if self.max_gold is not None and self.max_gold < self.min_gold:
            raise ConfigurationError(f"max_gold is {self.max_gold}, below min_gold, which is {self.min_gold}")

    def tasks(self, split: str) -> Sequence[Task]:
        """The split's first solvable seeds, in the order of ``seeds_of``; ids name fold and seed ("coin-train-17")."""
        if split not in FOLDS:
            raise ConfigurationError(f"split is {split!r}, it can be one of: {', '.join(FOLDS)}")
        wanted = {"train": self.train_tasks, "validation": self.validation_tasks, "test": self.test_tasks}[split]
        fold = FOLDS[split] if self.split_by == "fold" else "train"
        tasks: list[Task] = []
        for tried, seed in enumerate(seeds_of(split)[self.skip_seeds :]):
            if len(tasks) >= wanted or (not tasks and tried >= PATIENCE):
                break
            if self._accepts(GameKey(self.game, self._parameters, fold, seed)):
                tasks.append(Task(id=f"{self.game}-{fold}-{seed}", payload=GameTask(fold, seed)))
        if len(tasks) < wanted:
            self._refuse_count(split, wanted, len(tasks))
        return tasks

    def _accepts(self, key: GameKey) -> bool:
        gold = expert.gold_path(key)
        return gold is not None and self.min_gold <= len(gold) and (self.max_gold is None or len(gold) <= self.max_gold)

    def _refuse_count(self, split: str, wanted: int, found: int) -> NoReturn:
        raise ConfigurationError(
            f"{split}_tasks is {wanted}, but only {found} seeds of {self.game} ({self._parameters or 'defaults'}) "
            f"have a gold path of {self.min_gold} to {self.max_gold or 'any number of'} actions"
        )

    def reset(self, task: Task) -> list[Message]:
        """Start the task's game: one message with the task and what the agent sees."""
        self._key = GameKey(self.game, self._parameters, task.payload.fold, task.payload.seed)
        self._actions: tuple[str, ...] = ()
        self._steps = self._valid_steps = 0
        self._state = state_after(self._key, ())
        self._over = self._state.over
        description = tidy(task_description(self._key))
        return [Message(role="user", content=f"{description}\n\n{self._observation(self._state.observation)}")]

    def step(self, text: str) -> Step:
        """Act on the first line of ``text``; upper and lower case are the same."""
        if self._over:
            return Step("", 0.0, self._state.over, not self._state.over, self._info(valid=False))
        before = self._state
        action = self._admissible(text)
        if action is not None:
            self._actions = (*self._actions, action)
            self._state = state_after(self._key, self._actions)
        self._steps += 1
        self._valid_steps += action is not None
        terminated = self._state.over
        truncated = not terminated and self.max_steps is not None and self._steps >= self.max_steps
        self._over = terminated or truncated
        return Step(
            observation=""
            if self._over
            else self._observation(UNKNOWN_ACTION if action is None else self._state.observation),
            reward=float(self._state.success) if self.reward == "success" else self._state.score - before.score,
            terminated=terminated,
            truncated=truncated,
            info=self._info(valid=action is not None),
        )

    def expert_action(self) -> str:
        """The gold action; off the gold path the first action of a way to success, found by playing ahead. Or the
        explorer's.

        Raises:
            LookupError: the game is over, or no such way was found near the gold path.
        """
        if self.expert == "explorer":
            return explorer_action(self._key, self._actions)
        return expert.expert_action(self._key, self._actions)

    def admissible_actions(self) -> tuple[str, ...]:
        """Actions that the game understands now."""
        return self._state.admissible

    def close(self) -> None:
        """End this process's JVM; it would start again if a game were played after."""
        jvm.close_jvm()

    def _admissible(self, text: str) -> str | None:
        lines = text.strip().splitlines() or [""]
        wanted = " ".join(lines[0].lower().split())
        return next((action for action in self._state.admissible if action.lower() == wanted), None)

    def _observation(self, text: str) -> str:
        text = condensed(text) if self.condense else tidy(text)
        if not self.show_admissible:
            return text
        return f"{text}\nAdmissible actions: {', '.join(self._state.admissible)}"

    def _info(self, valid: bool) -> dict[str, bool | float]:
        state, fraction = self._state, self._valid_steps / max(self._steps, 1)
        return {"success": state.success, "valid": float(valid), "valid_fraction": fraction, "score": state.score}


@lru_cache
def seeds_of(split: str) -> tuple[int, ...]:
    """The seeds of a split's range, in a fixed shuffled order.

    Java's generator answers neighbouring seeds with nearly the same first numbers, so the first few hundred seeds of a
    range are alike, and unlike those of another range: a policy trained on one block of seeds would be tested on
    another kind of game. Spread over the whole range, splits are drawn alike.
    """
    first = FIRST_SEEDS[split]
    return tuple(random.Random(0).sample(range(first, first + SEEDS_PER_SPLIT), SEEDS_PER_SPLIT))
