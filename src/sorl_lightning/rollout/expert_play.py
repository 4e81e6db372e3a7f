"""The expert alone in a world, without a tokenizer or limits on tokens: what it achieves, and how fast the world is."""

from __future__ import annotations

import time
from dataclasses import dataclass

from sorl_lightning.errors import RolloutError
from sorl_lightning.rollout.checked_episode import resolved
from sorl_lightning.rollout.environment import Environment, Step, expert_of, open_episode
from sorl_lightning.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertEpisode:
    """One episode.

    Attributes:
        success: whether the environment counts the task as solved.
        turns: actions taken.
        reset_seconds: wall-clock time that the episode took to open.
        step_seconds: of all its steps together; the expert's own thinking is not counted.
        step_processor_seconds: this process's processor time in them; a JVM or a server is another process.
    """

    success: bool
    turns: int
    reset_seconds: float
    step_seconds: float
    step_processor_seconds: float


async def play_expert(environment: Environment, task: Task, max_turns: int) -> ExpertEpisode:
    """Play ``task`` by the expert's actions to its end, or to ``max_turns``.

    Raises:
        ConfigurationError: the environment has no expert.
        RolloutError: the expert has no action for a state.
    """
    episode = open_episode(environment)
    expert = expert_of(episode)
    start = time.perf_counter()
    await resolved(episode.reset(task))
    reset_seconds, step_seconds, processor_seconds, turns = time.perf_counter() - start, 0.0, 0.0, 0
    while turns < max_turns:
        try:
            action = expert.expert_action()
        except LookupError as error:
            raise RolloutError(f"the expert has no action in task {task.id!r}: {error}") from error
        start, start_processor = time.perf_counter(), time.process_time()
        step = Step(*await resolved(episode.step(action)))
        step_seconds += time.perf_counter() - start
        processor_seconds += time.process_time() - start_processor
        turns += 1
        if step.over:
            break
    return ExpertEpisode(
        success=bool(step.info.get("success", False)),
        turns=turns,
        reset_seconds=reset_seconds,
        step_seconds=step_seconds,
        step_processor_seconds=processor_seconds,
    )
