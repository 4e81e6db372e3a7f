"""An environment, the engines that play in it and the event loop that runs them, given back together."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import Self

from sorl_lightning.rollout.engine import RolloutEngine
from sorl_lightning.rollout.environment import Environment, HasClose
from sorl_lightning.rollout.event_loop import EventLoopThread

T = TypeVar("T")


class Arena:
    """Where an environment is played; as a context manager it closes at the end.

    Args:
        environment: the prototype, which is closed with the arena.

    Attributes:
        loop: runs the episodes.
    """

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.loop = EventLoopThread()
        self._engines: list[RolloutEngine] = []

    def attach(self, engine: RolloutEngine, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Have ``engine`` meet the model that it serves, where it is new here."""
        if engine not in self._engines:
            engine.attach(model, tokenizer)
            self._engines.append(engine)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run to the end and return the result."""
        return self.loop.run(coroutine)

    def close(self) -> None:
        """Give back engines, environment and loop. Safe to call twice; what is played afterwards starts them anew."""
        for engine in self._engines:
            engine.close()
        self._engines = []
        if isinstance(self.environment, HasClose):
            self.loop.settle(self.environment.close())
        self.loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
