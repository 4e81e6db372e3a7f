"""The contract of an environment, as a test that users run on their own (in the manner of Gymnasium's check_env).

def test_my_environment():
    check_environment(MyEnvironment())
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence

from sorl_lightning.rollout.checked_episode import (
    ContractError,
    Transcript,
    check_admissible,
    difference,
    ended,
    opened,
    require,
    stepped,
)
from sorl_lightning.rollout.environment import Environment, HasAdmissibleActions, HasExpert, Step, open_episode
from sorl_lightning.types import Task

__all__ = ["ContractError", "check_environment"]

ChooseAction = Callable[[Environment, random.Random], str]

SPLITS = ("train", "validation", "test")
NONSENSE = (
    "",
    "  \n\n ",
    "\x00",
    "xyzzy",
    "a" * 20_000,
    "日本語 🙂 \ud83d",
    "<|im_end|>",
    '{"a": [',
    "look\nlook\nlook",
)


def check_environment(
    environment: Environment,
    split: str = "train",
    episodes: int = 3,
    seed: int = 0,
    actions: ChooseAction | None = None,
    deterministic: bool = True,
    max_steps: int = 30,
) -> None:
    """Play a few episodes and raise at the first breach of the contract.

    Args:
        environment: the prototype, as a config would build it.
        split: whose tasks are played.
        episodes: tasks to play.
        seed: of the choice of actions.
        actions: chooses an action for a running episode; by default a random admissible one, or a random word where
            the environment has no ``admissible_actions``.
        deterministic: whether the same task and actions must give the same transcript. Turn it off for worlds with
            chance in them; then shared state can no longer be told from chance, and is not looked for.
        max_steps: most actions of an episode that is played here; an expert may take ten times as many.

    Raises:
        ContractError: the first breach, as one sentence.
    """
    asyncio.run(_Checks(environment, seed, actions or choose_action, max_steps).run(split, episodes, deterministic))


def choose_action(environment: Environment, chance: random.Random) -> str:
    """A random admissible action, or a random word."""
    if isinstance(environment, HasAdmissibleActions):
        return chance.choice(environment.admissible_actions())
    return chance.choice(("look", "help", "yes", "no", "1", "a", "search"))


class _Checks:
    """All checks of one environment."""

    def __init__(self, environment: Environment, seed: int, actions: ChooseAction, max_steps: int) -> None:
        self.environment = environment
        self.seed = seed
        self.actions = actions
        self.max_steps = max_steps

    async def run(self, split: str, episodes: int, deterministic: bool) -> None:
        require(isinstance(self.environment, Environment), "an environment needs the methods tasks, reset and step")
        tasks = check_tasks(self.environment, split)[:episodes]
        transcripts = [await self.play(task, random.Random(self.seed + n)) for n, task in enumerate(tasks)]
        if deterministic:
            for task, transcript in zip(tasks, transcripts, strict=True):
                again = await self.replay(task, transcript.actions)
                require(
                    again == transcript, f"task {task.id!r} with the same actions went {difference(transcript, again)}"
                )
            await self.interleave(tasks, transcripts)
        for task in tasks:
            await self.try_nonsense(task)
            if isinstance(self.environment, HasExpert):
                await self.follow_expert(task)

    async def play(self, task: Task, chance: random.Random) -> Transcript:
        """An episode of chosen actions; at its end, a step too many must not go on."""
        episode = open_episode(self.environment)
        opening = await opened(episode, task)
        chosen: list[str] = []
        steps: list[Step] = []
        while len(chosen) < self.max_steps and not ended(steps):
            check_admissible(episode)
            chosen.append(self.actions(episode, chance))
            steps.append(await stepped(episode, chosen[-1]))
        if ended(steps):
            extra = await stepped(episode, chosen[-1], after_end=True)
            require(
                ended([extra]) and extra.reward == 0, f"{task.id!r}: a step after the end must end again, with reward 0"
            )
        return Transcript(opening, chosen, steps)

    async def replay(self, task: Task, actions: Sequence[str]) -> Transcript:
        """The same actions on a fresh episode."""
        episode = open_episode(self.environment)
        opening = await opened(episode, task)
        return Transcript(opening, list(actions), [await stepped(episode, action) for action in actions])

    async def interleave(self, tasks: Sequence[Task], transcripts: Sequence[Transcript]) -> None:
        """Every task twice, all episodes in turn: what they share shows as a transcript that has changed."""
        running = []
        for task, alone in [*zip(tasks, transcripts, strict=True)] * 2:
            episode = open_episode(self.environment)
            running.append((task, alone, episode, await opened(episode, task), list[Step]()))
        for turn in range(max(len(alone.actions) for alone in transcripts)):
            for _, alone, episode, _, steps in running:
                if turn < len(alone.actions):
                    steps.append(await stepped(episode, alone.actions[turn]))
        for task, alone, _, opening, steps in running:
            beside = Transcript(opening, alone.actions, steps)
            apart = difference(alone, beside)
            require(beside == alone, f"episodes share state: task {task.id!r}, played beside others, went {apart}")

    async def try_nonsense(self, task: Task) -> None:
        """No text may raise: neither as the first action, nor in a row."""
        for text in NONSENSE:
            episode = open_episode(self.environment)
            await opened(episode, task)
            await stepped(episode, text)
        steps: list[Step] = []
        episode = open_episode(self.environment)
        await opened(episode, task)
        for text in NONSENSE:
            if not ended(steps):
                steps.append(await stepped(episode, text))

    async def follow_expert(self, task: Task) -> None:
        """The expert's actions must solve the task."""
        episode = open_episode(self.environment)
        await opened(episode, task)
        assert isinstance(episode, HasExpert)
        steps: list[Step] = []
        while not ended(steps):
            require(len(steps) < 10 * self.max_steps, f"the expert did not solve {task.id!r} in {len(steps)} actions")
            try:
                action = episode.expert_action()
            except LookupError as error:
                raise ContractError(f"the expert of {task.id!r} gave up after {len(steps)} actions: {error}") from error
            require(isinstance(action, str), f"expert_action must return a string, got {action!r}")
            steps.append(await stepped(episode, action))
        solved = steps[-1].terminated and steps[-1].info.get("success") is True
        require(solved, f"the expert of {task.id!r} ended without info['success'] after {len(steps)} actions")


def check_tasks(environment: Environment, split: str) -> Sequence[Task]:
    """Tasks are there, the same on every call, and no two of them, in any split, share an id."""
    tasks = environment.tasks(split)
    require(len(tasks) > 0, f"tasks({split!r}) is empty")
    require(all(isinstance(task, Task) for task in tasks), f"tasks({split!r}) must hold Task objects, got {tasks[0]!r}")
    ids = [task.id for task in tasks]
    require(all(isinstance(i, str) for i in ids), f"task ids must be strings, got {ids[0]!r}")
    require(not repeated(ids), f"tasks({split!r}) has two tasks with the id {repeated(ids)}")
    again = [task.id for task in environment.tasks(split)]
    require(again == ids, f"tasks({split!r}) gave other tasks, or another order, on a second call")
    for other in SPLITS:
        shared = set(ids) & {task.id for task in environment.tasks(other)} if other != split else set()
        require(not shared, f"the splits {split!r} and {other!r} share the task {min(shared, default='')!r}")
    return tasks


def repeated(ids: Sequence[str]) -> list[str]:
    """Ids that come more than once."""
    return sorted(i for i, count in Counter(ids).items() if count > 1)
