"""What simulations in virtual time share: episodes, an engine and a trainer around the product's collector and pool.

Collector, gate, pool and their decisions are the product's own; turns, training and pushes of weights are sleeps on a
clock that jumps.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from sorl_lightning.models import load_tokenizer
from sorl_lightning.rollout.chat import Chat
from sorl_lightning.rollout.collector import Collection, Collector, Sampling
from sorl_lightning.rollout.engine import RolloutEngine, TrajectoryKey, derive_seed
from sorl_lightning.rollout.environment import Environment, Step
from sorl_lightning.rollout.gate import Gate
from sorl_lightning.rollout.pool import GroupPool
from sorl_lightning.types import Completion, Message, Task


class Errands(Environment):
    """Episodes of as many turns as ``turns`` says of their task; each step takes ``seconds``."""

    def __init__(self, turns: Callable[[Task], int], seconds: float = 0.0) -> None:
        self.turns = turns
        self.seconds = seconds

    def tasks(self, split: str) -> list[Task]:
        return []

    def reset(self, task: Task) -> list[Message]:
        self.left = self.turns(task)
        return [Message(role="user", content="go")]

    def step(self, text: str) -> Any:
        self.left -= 1
        step = Step("on", 1.0, self.left == 0)
        return self._later(step) if self.seconds else step

    async def _later(self, step: Step) -> Step:
        await asyncio.sleep(self.seconds)
        return step


class RememberingChat(Chat):
    """A simulation says the same few things over and over: each is rendered and encoded once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._rendered: dict[Any, str] = {}
        self.encode = functools.cache(super().encode)  # type: ignore[method-assign]
        self._decoded = functools.cache(super().text)
        super().__init__(tokenizer)

    def text(self, completion_ids: Sequence[int]) -> str:
        return self._decoded(tuple(completion_ids))

    def render(self, messages: Sequence[Message]) -> str:
        key = tuple((message["role"], message["content"]) for message in messages)
        if key not in self._rendered:
            self._rendered[key] = super().render(messages)
        return self._rendered[key]


class SimulatedEngine(RolloutEngine):
    """Knows the version of its weights; subclasses say how long a turn takes."""

    version = 0

    def attach(self, policy: Any, tokenizer: Any) -> None: ...

    def load_weights(self, weights: Any, version: int) -> None:
        self.version = version

    async def stop_for(self, seconds: float) -> None:
        """New weights arrive for so long, and turns in flight stand still."""
        await asyncio.sleep(seconds)

    def open(self, trajectory: Any) -> None: ...

    def release(self, trajectory: Any) -> None: ...

    def close(self) -> None: ...


def one_token(version: int) -> Completion:
    """A turn of one token: its cost is the simulation's business."""
    return Completion(token_ids=(300,), logprobs=(0.0,), finish_reason="length", policy_version=(version,))


def position_of(key: TrajectoryKey) -> int:
    """The task's position in the run, which the gate keeps below 0."""
    return -1 - key.task if key.task < 0 else key.task


class Trainer:
    """Takes collections and sleeps over them.

    Args:
        quota: groups of a collection; siblings: trajectories of a group.
        training: seconds that a collection trains.
        push: seconds that new weights take to reach the engine.

    Attributes:
        ends: when each collection had been trained, seconds.
    """

    def __init__(
        self,
        engine: SimulatedEngine,
        environment: Environment,
        quota: int,
        siblings: int,
        seed: int,
        training: Callable[[Collection], float],
        push: float = 0.0,
    ) -> None:
        self.engine = engine
        self.environment = environment
        self.quota = quota
        self.siblings = siblings
        self.seed = seed
        self.training = training
        self.push = push
        self.chat = RememberingChat(load_tokenizer("sorl:textworld"))
        self.gate = Gate(engine)
        self.collections: list[Collection] = []
        self.ends: list[float] = []

    async def synchronous(self, collections: int) -> float:
        """One collection at a time; seconds."""
        collector = self._collector(self.engine)
        for index in range(collections):
            await self._load(index)
            positions = range(index * self.quota, (index + 1) * self.quota)
            tasks = [Task(id=str(position)) for position in positions]
            seed = derive_seed(self.seed, "train")
            await self._train(await collector.collect(tasks, 10**6, seed, index, index, positions))
        return asyncio.get_running_loop().time()

    async def streaming(self, collections: int, pool: GroupPool, end_known: bool = True) -> float:
        """As the datamodule does it; seconds."""
        for index in range(collections):
            await self.gate.hold()
            await self._load(index)
            await pool.loaded(index)
            await self.gate.free()
            room = pool.room(collections - index if end_known else None)
            tasks = {position: Task(id=str(position)) for position in range(pool.drawn, pool.drawn + room)}
            seed = derive_seed(self.seed, "train")
            await pool.advance(self._collector(self.gate), tasks, 10**6, seed, pool.drawn + room)
            await pool.ready()
            await self._train(await pool.take(index))
        seconds = asyncio.get_running_loop().time()
        await pool.suspend()
        return seconds

    def _collector(self, engine: RolloutEngine) -> Collector:
        sampling = Sampling(max_tokens=1, context_limit=4096, temperature=1.0)
        return Collector(self.environment, engine, self.chat, sampling, self.siblings)

    async def _load(self, version: int) -> None:
        self.engine.load_weights((), version)
        if self.push:
            await self.engine.stop_for(self.push)

    async def _train(self, collection: Collection) -> None:
        self.collections.append(collection)
        await asyncio.sleep(self.training(collection))
        self.ends.append(asyncio.get_running_loop().time())
