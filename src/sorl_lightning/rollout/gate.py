"""An engine whose new turns can be held back while weights change."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.engine import GenerationRequest, RolloutEngine, TrajectoryKey
from sorl_lightning.types import Completion


@runtime_checkable
class HasStreaming(Protocol):
    """An engine that can generate while the policy is trained.

    Its ``load_weights`` is called from another thread than its coroutines, while trajectories are open and turns are in
    flight, and every token carries the version of the weights that sampled it. No new turn is asked for meanwhile.
    """

    def check_streaming(self) -> None:
        """Refuse settings under which it cannot.

        Raises:
            ConfigurationError: names the setting.
        """
        ...


def check_streaming(engine: RolloutEngine) -> None:
    """Refuse an engine that cannot generate while the policy is trained.

    Raises:
        ConfigurationError: names the engine, or its setting.
    """
    if not isinstance(engine, HasStreaming):
        raise ConfigurationError(
            f"data.max_staleness above 0 generates while the policy is trained, and {type(engine).__name__} does not "
            "say that it can (check_streaming): use LocalEngine or VLLMEngine, or set data.max_staleness to 0"
        )
    engine.check_streaming()


class Gate(RolloutEngine):
    """Passes everything on, to keys below 0, which those of an evaluation by the same engine never are.

    Args:
        engine: generates. Attaching it, its weights and its end are its owner's.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self._free = asyncio.Event()
        self._free.set()
        self._open: set[TrajectoryKey] = set()

    async def hold(self) -> None:
        """Hold back turns that are asked for from now on. Those in flight are the engine's business."""
        self._free.clear()

    async def free(self) -> None:
        """Let them through again."""
        self._free.set()

    def attach(self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Nothing: the engine's owner attaches it."""
        return

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Nothing: the engine's owner loads them."""
        return

    def open(self, trajectory: TrajectoryKey) -> None:
        """Open it."""
        self._open.add(trajectory)
        self.engine.open(_apart(trajectory))

    async def generate(self, request: GenerationRequest) -> Completion:
        """Generate one turn, once turns are let through."""
        while not self._free.is_set():
            await self._free.wait()
        return await self.engine.generate(dataclasses.replace(request, trajectory=_apart(request.trajectory)))

    def release(self, trajectory: TrajectoryKey) -> None:
        """Release it, if it is open."""
        if trajectory in self._open:
            self._open.remove(trajectory)
            self.engine.release(_apart(trajectory))

    def close(self) -> None:
        """Release what is open: trajectories that were given up before their first turn."""
        for trajectory in list(self._open):
            self.release(trajectory)


def _apart(trajectory: TrajectoryKey) -> TrajectoryKey:
    return TrajectoryKey(-1 - trajectory.task, trajectory.sibling)
