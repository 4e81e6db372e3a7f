"""What worlds that are acted on in words have in common: one action a turn, read, played, answered, counted."""

from __future__ import annotations

import asyncio
import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, NamedTuple, TypeVar

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.actions import without_thoughts
from sorl_lightning.rollout.environment import Environment, Step
from sorl_lightning.types import Message, Task

T = TypeVar("T")

TAGGED = re.compile(r"<action>(.*?)</action>", re.DOTALL)
# As verl-agent's prompts have it; added to the opening message where ``action_tags`` is set.
TAG_RULE = (
    "Reason step by step within <think> </think> tags, then write one action within <action> </action> tags, "
    "like <action>{example}</action>."
)
UNTAGGED = "Your answer has no action: write exactly one within <action> </action> tags."


class Scene(NamedTuple):
    """What an action led to.

    Attributes:
        observation: the world's answer, in its own words.
        score: progress so far, 1 for a solved task.
        success: whether the task is solved.
        over: whether the episode has ended, solved or lost.
    """

    observation: str
    score: float = 0.0
    success: bool = False
    over: bool = False


def written_action(text: str, tagged: bool) -> str | None:
    """The action in a policy's text, with single spaces; None where tags are asked for and missing.

    >>> written_action("<think>The lamp is there.</think><action> use  lamp 1 </action>", tagged=True)
    'use lamp 1'
    >>> written_action("use lamp 1\\nthen leave", tagged=False)
    'use lamp 1'
    """
    if tagged:
        blocks = TAGGED.findall(without_thoughts(text))
        return " ".join(blocks[0].split()) if len(blocks) == 1 else None
    lines = text.strip().splitlines() or [""]
    return " ".join(lines[0].split())


class TextGame(Environment):
    """A world that takes one action in words a turn. A subclass says how it begins, acts, and what it understands.

    Args:
        max_steps: steps after which an episode is truncated; None leaves that to the collector's turn limit.
        reward: "score": what an action adds to the score; "success": 1 for the action that solves the task.
        invalid_penalty: taken off the reward of an action that is not understood.
        action_tags: the policy thinks first and writes its action within <action> tags; the expert writes them too.
        show_admissible: append the admissible actions to every observation.

    Step info: "success"; "valid", whether the action was understood, 1.0 or 0.0; "valid_fraction", its mean over the
    episode so far; "score".
    """

    # Whether playing waits for something outside this process; it then runs in a thread, and ``step_timeout`` holds.
    waits: bool = False
    example_action: ClassVar[str] = "look"

    def __init__(
        self,
        max_steps: int | None = None,
        reward: Literal["score", "success"] = "score",
        invalid_penalty: float = 0.0,
        action_tags: bool = False,
        show_admissible: bool = False,
    ) -> None:
        if reward not in ("score", "success"):
            raise ConfigurationError(f"reward is {reward!r}, it can be one of: score, success")
        if max_steps is not None and max_steps < 1:
            raise ConfigurationError(f"max_steps is {max_steps}, need at least 1, or null for no limit")
        if invalid_penalty < 0:
            raise ConfigurationError(f"invalid_penalty is {invalid_penalty}, need 0 or more")
        self.max_steps = max_steps
        self.reward = reward
        self.invalid_penalty = invalid_penalty
        self.action_tags = action_tags
        self.show_admissible = show_admissible

    @abstractmethod
    def begin(self, task: Task) -> Scene:
        """Start the episode; its observation says what the task is."""
        ...

    @abstractmethod
    def act(self, action: str) -> Scene | None:
        """Play ``action``; None, and nothing has changed, where the world does not understand it."""
        ...

    @abstractmethod
    def understood(self) -> Sequence[str]:
        """Actions that the world understands now."""
        ...

    @abstractmethod
    def gold_action(self) -> str:
        """A good action now.

        Raises:
            LookupError: none is known.
        """
        ...

    def refusal(self, action: str) -> str:
        """The answer to an action that is not understood."""
        return "Nothing happens: this action is not possible here."

    def shown_actions(self) -> Sequence[str]:
        """The list that ``show_admissible`` appends."""
        return sorted(self.understood())

    async def reset(self, task: Task) -> list[Message]:
        """Start the task: one message with the task and what the agent sees."""
        self._scene = await self._played(self.begin, task)
        self._steps = self._valid_steps = 0
        self._ended = self._scene.over
        rule = f"\n\n{TAG_RULE.format(example=self.example_action)}" if self.action_tags else ""
        return [Message(role="user", content=self._observation(self._scene.observation) + rule)]

    async def step(self, text: str) -> Step:
        """Act on the action in ``text``; see ``written_action``."""
        if self._ended:
            return Step("", 0.0, self._scene.over, not self._scene.over, self._info(valid=False))
        before, action = self._scene, written_action(text, self.action_tags)
        answer = None if action is None else await self._played(self.act, action)
        valid = answer is not None
        self._scene = scene = before if answer is None else answer
        self._steps += 1
        self._valid_steps += valid
        truncated = not scene.over and self.max_steps is not None and self._steps >= self.max_steps
        self._ended = scene.over or truncated
        words = scene.observation if valid else UNTAGGED if action is None else self.refusal(action)
        gain = float(scene.success) if self.reward == "success" else scene.score - before.score
        return Step(
            observation="" if self._ended else self._observation(words),
            reward=gain if valid else -self.invalid_penalty,
            terminated=scene.over,
            truncated=truncated,
            info=self._info(valid),
        )

    def expert_action(self) -> str:
        """The expert's next action, within tags where they are asked for.

        Raises:
            LookupError: the episode is over, or the expert knows no action.
        """
        if self._ended:
            raise LookupError("the episode is over")
        return self._written(self.gold_action())

    def admissible_actions(self) -> list[str]:
        """Actions that the world understands now, as the policy would write them."""
        return sorted(self._written(action) for action in self.understood())

    def _written(self, action: str) -> str:
        return f"<action>{action}</action>" if self.action_tags else action

    def _observation(self, words: str) -> str:
        if not self.show_admissible or self._scene.over:
            return words
        return f"{words}\nAdmissible actions: {', '.join(self.shown_actions())}"

    def _info(self, valid: bool) -> dict[str, bool | float]:
        scene, fraction = self._scene, self._valid_steps / max(self._steps, 1)
        return {
            "success": scene.success,
            "valid": float(valid),
            "valid_fraction": fraction,
            "score": float(scene.score),
        }

    async def _played(self, play: Callable[..., T], *arguments: object) -> T:
        return await asyncio.to_thread(play, *arguments) if self.waits else play(*arguments)
