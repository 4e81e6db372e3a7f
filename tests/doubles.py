"""Small real things for tests: a world that counts, an engine that says what it is told."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from sorl_lightning.rollout.engine import GenerationRequest, RolloutEngine, TrajectoryKey
from sorl_lightning.rollout.environment import Environment, Step
from sorl_lightning.types import Completion, Message, Task


class Countdown(Environment):
    """An episode of as many turns as the task's payload says; each turn is worth the parity of the text's length.

    Args:
        turns: payloads of the train tasks; held-out splits have three tasks of two turns.
        fails: called with (task, attempt) in ``reset`` and (task, attempt, text) in ``step``; may raise.
    """

    def __init__(self, turns: Sequence[int] = (1, 2, 3, 4), fails: Callable[..., None] | None = None) -> None:
        self.turns = turns
        self.fails = fails
        self.resets: dict[str, int] = {}

    def tasks(self, split: str) -> list[Task]:
        turns = self.turns if split == "train" else (2, 2, 2)
        return [Task(id=f"{split}-{index}", payload=count) for index, count in enumerate(turns)]

    def reset(self, task: Task) -> list[Message]:
        attempt = self.resets[task.id] = self.resets.get(task.id, 0) + 1
        if self.fails is not None:
            self.fails(task, attempt)
        self.task, self.attempt, self.left = task, attempt, int(task.payload)
        return [Message(role="user", content=f"count down from {self.left}")]

    def step(self, text: str) -> Step:
        if self.fails is not None:
            self.fails(self.task, self.attempt, text)
        self.left -= 1
        reward = float(len(text) % 2)
        return Step(f"{self.left} left", reward, self.left == 0, False, {"success": reward > 0, "length": len(text)})


class ScriptedEngine(RolloutEngine):
    """Says what ``script`` says: token ids and their log-probabilities for each request.

    Args:
        script: from the request; without one, random tokens of the request's own seed.
        delay: seconds to wait before each answer.
    """

    def __init__(
        self,
        script: Callable[[GenerationRequest], tuple[Sequence[int], Sequence[float]]] | None = None,
        delay: float = 0.0,
    ) -> None:
        self.script = script or random_words
        self.delay = delay
        self.requests: list[GenerationRequest] = []
        self.live: set[TrajectoryKey] = set()
        self.version = -1
        self.closed = 0

    def attach(self, policy: Any, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        for _ in weights:
            pass
        self.version = version

    def check_streaming(self) -> None:
        return

    def open(self, trajectory: TrajectoryKey) -> None:
        assert trajectory not in self.live
        self.live.add(trajectory)

    async def generate(self, request: GenerationRequest) -> Completion:
        assert request.trajectory in self.live
        self.requests.append(request)
        await asyncio.sleep(self.delay)
        ids, logprobs = self.script(request)
        ids = ids[: request.max_tokens]
        return Completion(
            token_ids=tuple(ids),
            logprobs=tuple(logprobs[: len(ids)]),
            finish_reason="stop" if ids and ids[-1] in request.stop_token_ids else "length",
            policy_version=(self.version,) * len(ids),
        )

    def release(self, trajectory: TrajectoryKey) -> None:
        self.live.remove(trajectory)

    def close(self) -> None:
        self.closed += 1


def random_words(request: GenerationRequest) -> tuple[list[int], list[float]]:
    """One to three tokens and a stop, with made-up log-probabilities that differ from the policy's."""
    generator = random.Random(request.seed)
    words = [generator.randrange(300, 1000) for _ in range(generator.randint(1, 3))]
    return [*words, request.stop_token_ids[0]], [-generator.uniform(5.0, 9.0) for _ in range(len(words) + 1)]


def odd_first_token(trajectory: Trajectory) -> float:
    """A reward that any policy gets about half of the time."""
    return float(trajectory.turns[0].completion.token_ids[0] % 2)
