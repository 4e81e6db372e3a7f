"""A trajectory in the making, and what it becomes."""

from __future__ import annotations

from dataclasses import dataclass, field

from sorl_lightning.rollout.chat import Conversation
from sorl_lightning.rollout.engine import TrajectoryKey
from sorl_lightning.rollout.environment import Step
from sorl_lightning.rollout.guarded_episode import GuardedEpisode
from sorl_lightning.types import Ending, Trajectory, Turn


@dataclass(kw_only=True)
class Episode:
    """One attempt at a trajectory.

    Attributes:
        seed: of its sampling.
        expert_turns: turns that the expert opens it with.
        step: the environment's last answer.
    """

    key: TrajectoryKey
    seed: int
    world: GuardedEpisode
    conversation: Conversation
    expert_turns: int
    turns: list[Turn] = field(default_factory=list)
    step: Step = field(default_factory=lambda: Step("", 0.0, False))

    def ending(self, max_turns: int, context_limit: int) -> Ending | None:
        """How it ended, None while it goes on. A finished one is done whatever its length."""
        if self.step.terminated:
            return Ending.DONE
        if self.step.truncated or len(self.turns) >= max_turns:
            return Ending.TURN_LIMIT
        return Ending.CONTEXT_LIMIT if len(self.conversation.prompt_ids) >= context_limit else None

    def trajectory(self, ending: Ending, turn_limit: int, started: int) -> Trajectory:
        """What it has become."""
        info = dict(self.step.info)
        success = bool(info.pop("success", False))
        return Trajectory(
            task=self.world.task,
            group=self.key.task,
            sibling=self.key.sibling,
            turns=tuple(self.turns),
            reward=sum(turn.reward for turn in self.turns),
            success=success,
            ending=ending,
            turn_limit=turn_limit,
            seed=self.seed,
            started=started,
            metrics={name: float(value) for name, value in info.items() if isinstance(value, (bool, int, float))},
        )
