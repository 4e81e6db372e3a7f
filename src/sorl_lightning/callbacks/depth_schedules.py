"""Rollout depths that follow the collections alone: the neighbours of RolloutDepthController."""

from __future__ import annotations

from abc import abstractmethod

import lightning as L
from typing_extensions import override

from sorl_lightning.callbacks.knob_setter import KnobSetter
from sorl_lightning.control import HasRolloutBudget, owner_of
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.functional.schedules import fraction, staircase


class DepthSchedule(KnobSetter):
    """Sets the depth of each collection when its epoch starts; there is nothing to remember."""

    knob = "rollout_budget.max_turns"

    @abstractmethod
    def turns(self, collection: int, ceiling: int) -> int:
        """Turns of collection ``collection``, counted from 0, where ``ceiling`` are allowed."""

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        budget = owner_of(HasRolloutBudget, trainer.datamodule).rollout_budget  # type: ignore[attr-defined,type-abstract]
        budget.limit(self.turns(trainer.current_epoch, budget.ceiling))


class FixedDepth(DepthSchedule):
    """The same depth throughout, below the run's ``data.max_turns``, at which validation stays.

    Args:
        depth: turns.
    """

    def __init__(self, depth: int) -> None:
        check_least(self, depth=depth)
        self.depth = depth

    @override
    def turns(self, collection: int, ceiling: int) -> int:
        return min(self.depth, ceiling)


class TOPD(DepthSchedule):
    """Truncated on-policy distillation: a fixed share of the full depth, ceil(share H_max) turns.

    Args:
        share: rho, in (0, 1].

    Source: arXiv:2605.31490.
    """

    def __init__(self, share: float = 0.5) -> None:
        if not 0 < share <= 1:
            raise ConfigurationError(f"TOPD.share must be in (0, 1], got {share}")
        self.share = share

    @override
    def turns(self, collection: int, ceiling: int) -> int:
        return fraction(self.share, ceiling)


class POPD(DepthSchedule):
    """Progressive on-policy distillation: min(H_max, start + rise floor(k / every)) turns, k collections made.

    Args:
        start: turns of the first collections.
        rise: turns added at each step.
        every: collections from step to step.

    Source: arXiv:2605.31490; start and rise are our choice.
    """

    def __init__(self, start: int = 2, rise: int = 1, every: int = 1) -> None:
        check_least(self, start=start, rise=rise, every=every)
        self.start = start
        self.rise = rise
        self.every = every

    @override
    def turns(self, collection: int, ceiling: int) -> int:
        return staircase(collection, self.start, self.rise, self.every, maximum=ceiling)


class TCODF2B(DepthSchedule):
    """Curriculum from front to back: min(start + floor(k / every), H_max) turns, k collections made.

    Args:
        start: turns of the first collections.
        every: collections from turn to turn.

    Source: arXiv:2604.24005 (TCOD-F2B).
    """

    def __init__(self, start: int = 1, every: int = 2) -> None:
        check_least(self, start=start, every=every)
        self.start = start
        self.every = every

    @override
    def turns(self, collection: int, ceiling: int) -> int:
        return staircase(collection, self.start, 1, self.every, maximum=ceiling)


def check_least(owner: object, **counts: int) -> None:
    """Refuse counts below 1."""
    for name, value in counts.items():
        if value < 1:
            raise ConfigurationError(f"{type(owner).__name__}.{name} must be at least 1, got {value}")
