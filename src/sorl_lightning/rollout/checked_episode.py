"""An episode whose every answer is checked against the contract of ``Environment``."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from sorl_lightning.rollout.environment import Environment, HasAdmissibleActions, Step
from sorl_lightning.types import Message, Task

T = TypeVar("T")

ROLES = ("system", "user", "assistant", "tool")


class ContractError(AssertionError):
    """An environment breaks the contract; the message is one sentence that says where."""


class Transcript(NamedTuple):
    """What one episode showed: its opening messages and, action by action, the environment's answers."""

    opening: list[Message]
    actions: list[str]
    steps: list[Step]


def check_admissible(episode: Environment) -> None:
    """Admissible actions of a running episode: some, strings, sorted."""
    if isinstance(episode, HasAdmissibleActions):
        actions = list(episode.admissible_actions())
        require(bool(actions), "admissible_actions is empty before the end of an episode")
        require(
            all(isinstance(action, str) for action in actions), f"admissible_actions must be strings, got {actions}"
        )
        require(actions == sorted(actions), f"admissible_actions must be sorted, got {actions}")


async def opened(episode: Environment, task: Task) -> list[Message]:
    """The checked opening messages of ``reset``."""
    try:
        messages = list(await resolved(episode.reset(task)))
    except Exception as error:
        raise ContractError(f"reset of {task.id!r} raised {error!r}") from error
    require(bool(messages or task.prompt), f"{task.id!r} opens with no message at all")
    for message in messages:
        require(
            is_message(message),
            f"reset must return messages with a role ({', '.join(ROLES)}) and a content, got {message!r}",
        )
    return messages


def is_message(message: object) -> bool:
    """Whether it has a known role, and text."""
    return isinstance(message, Mapping) and message.get("role") in ROLES and isinstance(message.get("content"), str)


async def stepped(episode: Environment, text: str, after_end: bool = False) -> Step:
    """The checked answer to ``text``."""
    try:
        answer = await resolved(episode.step(text))
    except RuntimeError as error:
        if after_end:
            return Step("", 0.0, True)  # refusing is as good
        raise ContractError(f"step({text[:40]!r}) raised {error!r}") from error
    except Exception as error:
        raise ContractError(f"step({text[:40]!r}) raised {error!r}; an action must never raise") from error
    require(
        isinstance(answer, tuple) and len(answer) == 5, f"step must return a Step or a tuple of five, got {answer!r}"
    )
    step = Step(*answer)
    said = step.observation
    messages = isinstance(said, Sequence) and all(is_message(message) for message in said)
    require(isinstance(said, str) or messages, f"an observation must be a string or messages, got {said!r}")
    number = isinstance(step.reward, (int, float)) and not isinstance(step.reward, bool)
    require(number and math.isfinite(step.reward), f"a reward must be a finite number, got {step.reward!r}")
    flags = isinstance(step.terminated, bool) and isinstance(step.truncated, bool)
    require(flags, f"terminated and truncated must be bool, got {step.terminated!r} and {step.truncated!r}")
    require(isinstance(step.info, Mapping), f"info must be a mapping, got {step.info!r}")
    require(isinstance(step.info.get("success", False), bool), f"info['success'] must be bool, got {step.info!r}")
    return step


async def resolved(value: T | Awaitable[T]) -> T:
    """``value``, awaited if it is awaitable: methods may be coroutines."""
    if inspect.isawaitable(value):
        return await value
    return value


def require(holds: bool, otherwise: str) -> None:
    """Raise ``otherwise`` unless the condition holds."""
    if not holds:
        raise ContractError(otherwise)


def ended(steps: Sequence[Step]) -> bool:
    """Whether the last of these steps ended its episode."""
    return bool(steps) and steps[-1].over


def difference(first: Transcript, second: Transcript) -> str:
    """Where two transcripts part, for a sentence."""
    if first.opening != second.opening:
        return f"differently from the opening on: {first.opening!r} against {second.opening!r}"
    pairs = enumerate(zip(first.steps, second.steps, strict=True))
    return next((f"differently at step {n}: {a!r} against {b!r}" for n, (a, b) in pairs if a != b), "the same")
