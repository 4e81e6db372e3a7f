"""One episode of an environment, whose errors are told apart from ours and whose words any tokenizer takes."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.environment import Environment, Step, expert_of, open_episode
from sorl_lightning.types import Message, Task

T = TypeVar("T")


class EnvironmentFailure(Exception):
    """An environment raised; the trajectory is tried again with a fresh one."""


class GuardedEpisode:
    """A fresh copy of an environment, playing one task.

    Every method raises EnvironmentFailure where the environment raises, but lets a ConfigurationError through.

    Args:
        prototype: the environment.
        task: to be played.
        step_timeout: longest wait for a method that is a coroutine, seconds; None waits for ever.
    """

    def __init__(self, prototype: Environment, task: Task, step_timeout: float | None) -> None:
        self.environment = open_episode(prototype)
        self.task = task
        self.step_timeout = step_timeout

    async def reset(self) -> Sequence[Message]:
        """The messages that open it."""
        return await self._ask(self.environment.reset, self.task)

    async def step(self, text: str) -> Step:
        """The answer to the policy's text."""
        answer = await self._ask(self.environment.step, text)
        return Step(self._readable(answer[0]), *answer[1:])

    async def expert_turns(self, most: int) -> int:
        """Turns that the environment's own expert takes to the end, ``most`` if there is none before."""
        for turns in range(most):
            action = await self._ask(expert_of(self.environment).expert_action)
            step = await self.step(action)
            if step.over:
                return turns + 1
        return most

    def _readable(self, observation: object) -> str | list[Message]:
        """An observation that any tokenizer takes."""
        if isinstance(observation, str):
            return without_surrogates(observation)
        if isinstance(observation, (list, tuple)):
            return [Message(role=m["role"], content=without_surrogates(m["content"])) for m in observation]
        raise self._failure(f"an observation must be text, got {type(observation).__name__}")

    async def _ask(self, method: Callable[..., T | Awaitable[T]], *arguments: object) -> T:
        """Call the environment, which may be plain or a coroutine."""
        try:
            answer = method(*arguments)
            return await asyncio.wait_for(answer, self.step_timeout) if inspect.isawaitable(answer) else answer
        except ConfigurationError:
            raise
        except Exception as error:
            if isinstance(error, asyncio.TimeoutError):
                error = TimeoutError(f"no answer within step_timeout={self.step_timeout} s")
            raise self._failure(f"{type(error).__name__}: {error}") from error

    def _failure(self, reason: str) -> EnvironmentFailure:
        return EnvironmentFailure(f"{type(self.environment).__name__} failed at task {self.task.id!r}: {reason}")


def without_surrogates(text: str) -> str:
    """``text`` as tokenizers take it: bytes that were no UTF-8, which arrive as lone surrogates, are question marks."""
    return text.encode("utf-8", errors="replace").decode()
