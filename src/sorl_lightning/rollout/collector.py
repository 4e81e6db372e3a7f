"""Roll out tasks: every trajectory of a collection at once, groups of siblings, exact bookkeeping."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from sorl_lightning.control import TurnAuthor
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.chat import Chat, Conversation
from sorl_lightning.rollout.engine import GenerationRequest, RolloutEngine, TrajectoryKey, derive_seed
from sorl_lightning.rollout.environment import Environment, Step, expert_of, observation_text, open_episode
from sorl_lightning.rollout.stream_figures import StreamFigures
from sorl_lightning.types import Author, Completion, Ending, Message, Task, Trajectory, Turn

T = TypeVar("T")
Reward = Callable[[Trajectory], float]
logger = logging.getLogger(__name__)


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
class Collection:
    """What one collection brought home.

    Attributes:
        index: 0-based number of the collection.
        trajectories: of whole groups only, ordered by group and sibling.
        failures: a sentence for each group that was dropped because its environment kept failing.
        dropped: trajectories dropped because a reward, log-probability or advantage was not finite.
        policy_version: version of the weights at its start.
        seconds: wall-clock time.
        discarded: trajectories of groups without signal, whose place others have taken.
        stream: what streaming did to it; None without.
    """

    index: int
    trajectories: tuple[Trajectory, ...]
    failures: tuple[str, ...] = ()
    dropped: int = 0
    policy_version: int = 0
    seconds: float = 0.0
    discarded: tuple[Trajectory, ...] = ()
    stream: StreamFigures | None = None

    @property
    def played(self) -> tuple[Trajectory, ...]:
        """All that was rolled out, trained or not: what figures about the policy are taken of."""
        return self.trajectories + self.discarded

    @property
    def sound(self) -> tuple[Trajectory, ...]:
        """Those that can be trained on, as the rows' ``trajectory`` numbers them."""
        return tuple(trajectory for trajectory in self.trajectories if trajectory.is_finite)

    def to(self, *_: object, **__: object) -> Collection:
        """Itself: nothing here lives on a device, and Lightning asks."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Guests:
    """Who plays turns beside the policy: the knob, and the engines of the authors that it may name."""

    author: TurnAuthor
    engines: Mapping[Author, RolloutEngine]


class EnvironmentFailure(Exception):
    """An environment raised; the trajectory is tried again with a fresh one."""


@dataclass(kw_only=True)
class _Episode:
    """A trajectory in the making."""

    key: TrajectoryKey
    task: Task
    seed: int
    environment: Environment
    conversation: Conversation
    expert_turns: int = 0
    turns: list[Turn] = field(default_factory=list)
    step: Step = field(default_factory=lambda: Step("", 0.0, False))


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
    episodes: Mapping[TrajectoryKey, _Episode | EnvironmentFailure]


Group = tuple[Trajectory, ...] | EnvironmentFailure  # what became of it: siblings in order


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
        self.chat = chat
        self.sampling = sampling
        self.group_size = group_size
        self.retries = retries
        self.reward = reward
        self.guests = guests
        self.step_timeout = step_timeout

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
        opened = await together([self._open(key, tasks[key.task], seed) for key in keys])
        if check_prompts is not None:
            check_prompts([len(episode.conversation.prompt_ids) for episode in opened if isinstance(episode, _Episode)])
        episodes: dict[int, dict[TrajectoryKey, _Episode | EnvironmentFailure]] = {position: {} for position in tasks}
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
                if isinstance(episode, _Episode):
                    try:
                        return await self._advance(episode, opening)
                    except EnvironmentFailure as error:
                        episode = error
                logger.warning("attempt %d of %d: %s", attempt, self.retries + 1, episode)
                if attempt <= self.retries:
                    episode = await self._open(key, opening.task, opening.seed, attempt)
            assert isinstance(episode, EnvironmentFailure)
            return episode
        finally:
            self.engine.release(key)

    async def _open(self, key: TrajectoryKey, task: Task, seed: int, attempt: int = 0) -> _Episode | EnvironmentFailure:
        environment = open_episode(self.environment)
        try:
            opening = await self._ask(task, environment.reset, task)
        except EnvironmentFailure as error:
            return error
        conversation = self.chat.open([*task.prompt, *opening])
        prompt_ids = conversation.prompt_ids
        if len(prompt_ids) >= self.sampling.context_limit:
            raise ConfigurationError(
                f"the first prompt of task {task.id!r} has {len(prompt_ids)} tokens, which leaves no room in "
                f"context_limit={self.sampling.context_limit}; raise it or leave the task out"
            )
        episode = _Episode(
            key=key,
            task=task,
            seed=derive_seed(seed, key.task, key.sibling, attempt),
            environment=environment,
            conversation=conversation,
        )
        if self.guests is not None and self.guests.author.expert_prefix is not None:
            try:
                episode.expert_turns = self.guests.author.expert_prefix(await self._expert_turns(task))
            except EnvironmentFailure as error:
                return error
        return episode

    async def _expert_turns(self, task: Task) -> int:
        """Turns of the expert's own way through ``task``, played ahead in an episode of its own."""
        environment = open_episode(self.environment)
        await self._ask(task, environment.reset, task)
        for turns in range(self.sampling.context_limit):  # each turn costs a token at least
            action = await self._ask(task, expert_of(environment).expert_action)
            step = Step(*await self._ask(task, environment.step, action))
            if step.terminated or step.truncated:
                return turns + 1
        return self.sampling.context_limit

    async def _advance(self, episode: _Episode, opening: Opening) -> Trajectory:
        ending: Ending | None = None
        while ending is None:
            await self._turn(episode)
            ending = self._ending(episode, opening.max_turns)
        return self._finish(episode, ending, opening)

    async def _turn(self, episode: _Episode) -> None:
        start = time.perf_counter()
        prompt_ids = episode.conversation.prompt_ids
        author = self._author(episode)
        completion = await self._generate(
            author,
            GenerationRequest(
                trajectory=episode.key,
                prompt_ids=prompt_ids,
                max_tokens=min(self.sampling.max_tokens, self.sampling.context_limit - len(prompt_ids)),
                stop_token_ids=self.chat.stop_token_ids,
                temperature=self.sampling.temperature,
                seed=derive_seed(episode.seed, len(episode.turns)),
                environment=episode.environment,
            ),
        )
        text = self.chat.text(completion.token_ids)
        answer = await self._ask(episode.task, episode.environment.step, text)
        episode.step = step = Step(self._readable(episode.task, answer[0]), *answer[1:])
        turn = Turn(
            index=len(episode.turns),
            prompt_ids=prompt_ids,
            completion=completion,
            text=text,
            observation=observation_text(step.observation) or None,
            reward=float(step.reward),
            seconds=time.perf_counter() - start,
            author=author,
        )
        episode.turns.append(turn)
        if not (step.terminated or step.truncated):
            episode.conversation.extend(completion.token_ids, step.observation)

    def _author(self, episode: _Episode) -> Author:
        if self.guests is None:
            return "policy"
        turn = len(episode.turns)
        if turn < episode.expert_turns:
            return "expert"
        chance = random.Random(derive_seed(episode.seed, "author", turn)).random()
        return "teacher" if chance < self.guests.author.teacher_probability else "policy"

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

    def _ending(self, episode: _Episode, max_turns: int) -> Ending | None:
        """How the episode ended, None while it goes on. A finished one is done whatever its length."""
        if episode.step.terminated:
            return Ending.DONE
        if episode.step.truncated or len(episode.turns) >= max_turns:
            return Ending.TURN_LIMIT
        return Ending.CONTEXT_LIMIT if len(episode.conversation.prompt_ids) >= self.sampling.context_limit else None

    def _finish(self, episode: _Episode, ending: Ending, opening: Opening) -> Trajectory:
        info = dict(episode.step.info)
        success = bool(info.pop("success", False))
        trajectory = Trajectory(
            task=episode.task,
            group=episode.key.task,
            sibling=episode.key.sibling,
            turns=tuple(episode.turns),
            reward=sum(turn.reward for turn in episode.turns),
            success=success,
            ending=ending,
            turn_limit=opening.max_turns,
            seed=episode.seed,
            started=opening.index,
            metrics={name: float(value) for name, value in info.items() if isinstance(value, (bool, int, float))},
        )
        if self.reward is None:
            return trajectory
        return dataclasses.replace(trajectory, reward=float(self.reward(trajectory)))

    def _readable(self, task: Task, observation: object) -> str | list[Message]:
        """An observation that any tokenizer takes."""
        if isinstance(observation, str):
            return without_surrogates(observation)
        if isinstance(observation, (list, tuple)):
            return [Message(role=m["role"], content=without_surrogates(m["content"])) for m in observation]
        kind, name = type(observation).__name__, type(self.environment).__name__
        raise EnvironmentFailure(f"{name} failed at task {task.id!r}: an observation must be text, got {kind}")

    async def _ask(self, task: Task, method: Callable[..., T | Awaitable[T]], *arguments: object) -> T:
        """Call the environment, which may be plain or a coroutine; whatever it raises is its failure."""
        try:
            answer = method(*arguments)
            return await asyncio.wait_for(answer, self.step_timeout) if inspect.isawaitable(answer) else answer
        except ConfigurationError:
            raise
        except Exception as error:
            name = type(self.environment).__name__
            if isinstance(error, asyncio.TimeoutError):
                error = TimeoutError(f"no answer within step_timeout={self.step_timeout} s")
            raise EnvironmentFailure(f"{name} failed at task {task.id!r}: {type(error).__name__}: {error}") from error


async def together(coroutines: Sequence[Awaitable[T]]) -> list[T]:
    """All results; the first error ends the others too."""
    futures = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*futures)
    finally:
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)


def without_surrogates(text: str) -> str:
    """``text`` as tokenizers take it: bytes that were no UTF-8, which arrive as lone surrogates, are question marks."""
    return text.encode("utf-8", errors="replace").decode()
