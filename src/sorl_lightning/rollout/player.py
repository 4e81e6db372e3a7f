"""Play one trajectory: turn after turn of engine and environment, with exact bookkeeping."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.chat import Chat
from sorl_lightning.rollout.engine import GenerationRequest, RolloutEngine, TrajectoryKey, derive_seed
from sorl_lightning.rollout.environment import Environment, observation_text
from sorl_lightning.rollout.episode import Episode
from sorl_lightning.rollout.guarded_episode import EnvironmentFailure, GuardedEpisode
from sorl_lightning.rollout.guests import Guests
from sorl_lightning.types import Author, Completion, Ending, Task, Trajectory, Turn

Reward = Callable[[Trajectory], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How turns are sampled.

    Attributes:
        max_tokens: most tokens of a turn.
        context_limit: most tokens of a trajectory, prompt and observations included.
        temperature: sampling temperature.
    """

    max_tokens: int
    context_limit: int
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """Plays trajectories with an engine; the arguments are those of Collector."""

    environment: Environment
    engine: RolloutEngine
    chat: Chat
    sampling: Sampling
    reward: Reward | None
    guests: Guests | None
    step_timeout: float | None

    async def open(self, key: TrajectoryKey, task: Task, seed: int, attempt: int = 0) -> Episode | EnvironmentFailure:
        """A fresh episode up to its first prompt, or why there is none.

        Args:
            seed: of the collection.
            attempt: number of episodes of this trajectory that have failed.

        Raises:
            ConfigurationError: the first prompt leaves no room in the context.
        """
        world = GuardedEpisode(self.environment, task, self.step_timeout)
        try:
            conversation = self.chat.open([*task.prompt, *await world.reset()])
            self._check_room(task, len(conversation.prompt_ids))
            expert_turns = await self._expert_turns(task)
        except EnvironmentFailure as error:
            return error
        return Episode(
            key=key,
            seed=derive_seed(seed, key.task, key.sibling, attempt),
            world=world,
            conversation=conversation,
            expert_turns=expert_turns,
        )

    async def play(self, episode: Episode, max_turns: int, started: int) -> Trajectory:
        """Play to the end.

        Args:
            started: collection at whose start it began.

        Raises:
            EnvironmentFailure: the environment failed.
            RolloutError: the engine did.
        """
        ending: Ending | None = None
        while ending is None:
            await self._turn(episode)
            ending = episode.ending(max_turns, self.sampling.context_limit)
        trajectory = episode.trajectory(ending, max_turns, started)
        if self.reward is None:
            return trajectory
        return dataclasses.replace(trajectory, reward=float(self.reward(trajectory)))

    def _check_room(self, task: Task, tokens: int) -> None:
        if tokens >= self.sampling.context_limit:
            raise ConfigurationError(
                f"the first prompt of task {task.id!r} has {tokens} tokens, which leaves no room in "
                f"context_limit={self.sampling.context_limit}; raise it or leave the task out"
            )

    async def _expert_turns(self, task: Task) -> int:
        """Turns that the expert opens with, of its own way through ``task``, played ahead in an episode of its own."""
        if self.guests is None or self.guests.author.expert_prefix is None:
            return 0
        ahead = GuardedEpisode(self.environment, task, self.step_timeout)
        await ahead.reset()
        most = self.sampling.context_limit  # each turn costs a token at least
        return self.guests.author.expert_prefix(await ahead.expert_turns(most))

    async def _turn(self, episode: Episode) -> None:
        start = time.perf_counter()
        author: Author = "policy"
        if self.guests is not None:
            author = self.guests.author_of(len(episode.turns), episode.expert_turns, episode.seed)
        request = self._request(episode)
        completion = await self._generate(author, request)
        text = self.chat.text(completion.token_ids)
        episode.step = step = await episode.world.step(text)
        turn = Turn(
            index=len(episode.turns),
            prompt_ids=request.prompt_ids,
            completion=completion,
            text=text,
            observation=observation_text(step.observation) or None,
            reward=float(step.reward),
            seconds=time.perf_counter() - start,
            author=author,
        )
        episode.turns.append(turn)
        if not step.over:
            episode.conversation.extend(completion.token_ids, step.observation)

    def _request(self, episode: Episode) -> GenerationRequest:
        prompt_ids = episode.conversation.prompt_ids
        return GenerationRequest(
            trajectory=episode.key,
            prompt_ids=prompt_ids,
            max_tokens=min(self.sampling.max_tokens, self.sampling.context_limit - len(prompt_ids)),
            stop_token_ids=self.chat.stop_token_ids,
            temperature=self.sampling.temperature,
            seed=derive_seed(episode.seed, len(episode.turns)),
            environment=episode.world.environment,
        )

    async def _generate(self, author: Author, request: GenerationRequest) -> Completion:
        if self.guests is None or author == "policy":
            return await self.engine.generate(request)
        guest = self.guests.engines[author]
        self.engine.release(request.trajectory)  # an engine that decodes in rounds would wait for it
        guest.open(request.trajectory)
        try:
            return await guest.generate(request)
        finally:
            guest.release(request.trajectory)
            self.engine.open(request.trajectory)
