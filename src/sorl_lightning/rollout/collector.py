"""Roll out tasks: every trajectory of a collection at once, in groups of siblings that stand or fall together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sorl_lightning.rollout.chat import Chat
from sorl_lightning.rollout.collection import Collection
from sorl_lightning.rollout.engine import RolloutEngine, TrajectoryKey
from sorl_lightning.rollout.environment import Environment
from sorl_lightning.rollout.episode import Episode
from sorl_lightning.rollout.gathering import together
from sorl_lightning.rollout.guarded_episode import EnvironmentFailure
from sorl_lightning.rollout.guests import Guests
from sorl_lightning.rollout.player import Player, Reward, Sampling
from sorl_lightning.types import Task, Trajectory

__all__ = [
    "Collection",
    "Collector",
    "EnvironmentFailure",
    "Group",
    "Guests",
    "Opening",
    "Reward",
    "Sampling",
]

logger = logging.getLogger(__name__)
Group = tuple[Trajectory, ...] | EnvironmentFailure  # what became of it: siblings in order


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A group whose episodes are open, or have failed to open, and wait for their first turn.

    Attributes:
        max_turns: most turns of a trajectory.
        seed: of the collection.
        index: number of the collection at whose start the group begins.
    """

    task: Task
    max_turns: int
    seed: int
    index: int
    episodes: Mapping[TrajectoryKey, Episode | EnvironmentFailure]


class Collector:
    """Plays tasks with an engine.

    Args:
        environment: prototype; each attempt at a trajectory plays a fresh copy.
        engine: generates the turns.
        chat: renders messages to tokens.
        sampling: limits and temperature.
        group_size: siblings a task.
        retries: fresh environments tried after a failure, for each trajectory.
        step_timeout: longest wait for an environment whose methods are coroutines, seconds; None waits for ever. A
            plain method cannot be interrupted.
        reward: replaces the sum of turn rewards as the trajectory's reward.
        guests: who plays turns beside the policy; None: nobody.
    """

    def __init__(
        self,
        environment: Environment,
        engine: RolloutEngine,
        chat: Chat,
        sampling: Sampling,
        group_size: int = 1,
        retries: int = 2,
        reward: Reward | None = None,
        guests: Guests | None = None,
        step_timeout: float | None = None,
    ) -> None:
        self.environment = environment
        self.engine = engine
        self.sampling = sampling
        self.group_size = group_size
        self.retries = retries
        self._player = Player(
            environment=environment,
            engine=engine,
            chat=chat,
            sampling=sampling,
            reward=reward,
            guests=guests,
            step_timeout=step_timeout,
        )

    async def collect(
        self,
        tasks: Sequence[Task],
        max_turns: int,
        seed: int,
        index: int = 0,
        policy_version: int = 0,
        positions: Sequence[int] | None = None,
        check_prompts: Callable[[Sequence[int]], None] | None = None,
    ) -> Collection:
        """Roll out ``group_size`` siblings of each task to at most ``max_turns`` turns.

        A group with a trajectory that failed for good is dropped whole and named in ``failures``; it is never a reward.

        Args:
            seed: every token of the collection depends on it, the task's position, the sibling and the turn alone.
            positions: of the tasks in the whole collection, where these are one rank's share; None: they are all.
            check_prompts: is given the tokens of each first prompt before anything is sampled, and may raise.

        Raises:
            ConfigurationError: a first prompt leaves no room in the context.
            RolloutError: the engine failed.
        """
        start = time.perf_counter()
        by_position = dict(zip(range(len(tasks)) if positions is None else positions, tasks, strict=True))
        openings = await self.open_groups(by_position, max_turns, seed, index, check_prompts)
        groups = await together([self.play_group(opening) for opening in openings])
        return Collection(
            index=index,
            trajectories=tuple(t for group in groups if not isinstance(group, EnvironmentFailure) for t in group),
            failures=tuple(str(group) for group in groups if isinstance(group, EnvironmentFailure)),
            policy_version=policy_version,
            seconds=time.perf_counter() - start,
        )

    async def open_groups(
        self,
        tasks: Mapping[int, Task],
        max_turns: int,
        seed: int,
        index: int,
        check_prompts: Callable[[Sequence[int]], None] | None = None,
    ) -> list[Opening]:
        """Open the episodes of all siblings of ``tasks``, which stand under their positions, and tell the engine.

        Every episode opens before the first token is sampled: a prompt that does not fit is found in time.

        Raises:
            ConfigurationError: a first prompt leaves no room in the context.
        """
        keys = [TrajectoryKey(position, sibling) for position in tasks for sibling in range(self.group_size)]
        opened = await together([self._player.open(key, tasks[key.task], seed) for key in keys])
        if check_prompts is not None:
            check_prompts([len(episode.conversation.prompt_ids) for episode in opened if isinstance(episode, Episode)])
        episodes: dict[int, dict[TrajectoryKey, Episode | EnvironmentFailure]] = {position: {} for position in tasks}
        for key, episode in zip(keys, opened, strict=True):
            episodes[key.task][key] = episode
            self.engine.open(key)
        return [
            Opening(task=task, max_turns=max_turns, seed=seed, index=index, episodes=episodes[position])
            for position, task in tasks.items()
        ]

    async def play_group(self, opening: Opening) -> Group:
        """Play a group to its end. One with a trajectory that failed for good is its failure, once all have ended."""
        results = await together([self._play(key, opening) for key in opening.episodes])
        failure = next((result for result in results if isinstance(result, EnvironmentFailure)), None)
        return failure or tuple(result for result in results if isinstance(result, Trajectory))

    async def _play(self, key: TrajectoryKey, opening: Opening) -> Trajectory | EnvironmentFailure:
        """One trajectory, with retries; a failure is a value, so that siblings play on."""
        episode = opening.episodes[key]
        try:
            for attempt in range(1, self.retries + 2):
                if isinstance(episode, Episode):
                    try:
                        return await self._player.play(episode, opening.max_turns, opening.index)
                    except EnvironmentFailure as error:
                        episode = error
                logger.warning("attempt %d of %d: %s", attempt, self.retries + 1, episode)
                if attempt <= self.retries:
                    episode = await self._player.open(key, opening.task, opening.seed, attempt)
            assert isinstance(episode, EnvironmentFailure)
            return episode
        finally:
            self.engine.release(key)
