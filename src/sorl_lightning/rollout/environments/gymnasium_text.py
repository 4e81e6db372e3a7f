"""Text environments with Gymnasium's ``reset`` and ``step``, which need not be installed for it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.interfaces import Interface
from sorl_lightning.rollout.environment import Environment, HasClose, Step
from sorl_lightning.types import Message, Task


class GymnasiumLike(Interface):
    """What is asked of a Gymnasium environment; deriving from this, or from Gymnasium, is not needed."""

    @abstractmethod
    def reset(self, *, seed: int | None = None) -> tuple[Any, Mapping[str, Any]]:
        """The first observation and an info."""
        ...

    @abstractmethod
    def step(self, action: Any) -> tuple[Any, ...]:
        """Observation, reward, terminated, truncated, info; or the older four."""
        ...


class GymnasiumText(Environment):
    """An environment whose observations are text and whose action is the policy's text.

    A task is a seed; each episode gets an environment of its own from ``make``. ``reset(seed=...)`` returns an
    observation and an info, ``step`` the five values of Gymnasium (or the four of the older gym).

    Args:
        make: class or function that makes one environment; in YAML a class path with its ``init_args``, or the path
            of a function.
        train_tasks: seeds of the train split; validation_tasks, test_tasks: likewise. No two splits share a seed.
        prompt: text before the first observation.

    Step info: "success", which is the info's "success", else its "won", else whether the episode was terminated with
    a positive sum of rewards; and every number of the info.
    """

    def __init__(
        self,
        make: Callable[[], GymnasiumLike],
        train_tasks: int = 500,
        validation_tasks: int = 100,
        test_tasks: int = 100,
        prompt: str = "",
    ) -> None:
        if min(train_tasks, validation_tasks, test_tasks) < 1:
            raise ConfigurationError(
                "train_tasks, validation_tasks and test_tasks must be at least 1, got "
                f"{train_tasks}, {validation_tasks} and {test_tasks}"
            )
        self.make = make
        self.train_tasks = train_tasks
        self.validation_tasks = validation_tasks
        self.test_tasks = test_tasks
        self.prompt = prompt

    def tasks(self, split: str) -> Sequence[Task]:
        """Seeds, counted on from split to split; ids are the split and the seed."""
        counts = {"train": self.train_tasks, "validation": self.validation_tasks, "test": self.test_tasks}
        if split not in counts:
            raise ConfigurationError(f"split is {split!r}, it can be one of: {', '.join(counts)}")
        # Held-out seeds come first, so that more training tasks leave them as they are.
        order = ("test", "validation", "train")
        first = sum(counts[earlier] for earlier in order[: order.index(split)])
        return [Task(id=f"{split}-{seed}", payload=seed) for seed in range(first, first + counts[split])]

    def reset(self, task: Task) -> list[Message]:
        """Make an environment and reset it with the task's seed."""
        self._world = self.make()
        observation, _ = self._world.reset(seed=task.payload)
        self._total, self._end = 0.0, Step("", 0.0, False)
        return [Message(role="user", content=f"{self.prompt}{observation}")]

    def step(self, text: str) -> Step:
        """Pass the action on; after the end, end again."""
        if self._end.over:
            return self._end._replace(observation="", reward=0.0)
        observation, reward, terminated, *rest = self._world.step(self.action(text))
        truncated, info = (False, rest[0]) if len(rest) == 1 else rest
        self._total += float(reward)
        over = bool(terminated or truncated)
        self._end = Step(
            observation="" if over else str(observation),
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated) and not terminated,
            info=numbers(info) | {"success": self._success(info, bool(terminated))},
        )
        if over and isinstance(self._world, HasClose):
            self._world.close()
        return self._end

    def action(self, text: str) -> Any:
        """What the environment's ``step`` is given."""
        return text

    def _success(self, info: Mapping[str, Any], terminated: bool) -> bool:
        return bool(info.get("success", info.get("won", terminated and self._total > 0)))


class GymnasiumActions(GymnasiumText):
    """An environment with numbered actions, which the policy calls by name.

    Any other text does nothing: it is answered with the names and never reaches the environment.

    Args:
        make: class or function that makes one environment.
        actions: names, in the order of their numbers.
        train_tasks: seeds of the train split; validation_tasks, test_tasks: likewise.
        prompt: text before the first observation.

    Step info: as ``GymnasiumText``'s; "valid", whether the text was such a name, 1.0 or 0.0.
    """

    def __init__(
        self,
        make: Callable[[], GymnasiumLike],
        actions: Sequence[str],
        train_tasks: int = 500,
        validation_tasks: int = 100,
        test_tasks: int = 100,
        prompt: str = "",
    ) -> None:
        super().__init__(make, train_tasks, validation_tasks, test_tasks, prompt)
        if not actions or len(set(actions)) != len(actions):
            raise ConfigurationError(f"actions needs names that differ, got {list(actions)}")
        self.actions = actions

    def step(self, text: str) -> Step:
        """Act by name."""
        known = " ".join(text.split()) in self.actions
        over = self._end.over
        if known or over:
            step = super().step(text)
        else:
            step = Step(f"Say one of: {', '.join(self.actions)}.", 0.0, False, info={"success": False})
        return step._replace(info={**step.info, "valid": float(known and not over)})

    def action(self, text: str) -> int:
        return list(self.actions).index(" ".join(text.split()))

    def admissible_actions(self) -> list[str]:
        """All names."""
        return sorted(self.actions)


def numbers(info: Mapping[str, Any]) -> dict[str, float]:
    """The entries of an info that can be averaged."""
    return {name: float(value) for name, value in info.items() if isinstance(value, (bool, int, float))}
