"""The pool of groups as the training thread sees it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sorl_lightning import ranks
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.collector import Collection, Collector
from sorl_lightning.rollout.engine import RolloutEngine, derive_seed
from sorl_lightning.rollout.event_loop import EventLoopThread
from sorl_lightning.rollout.gate import Gate
from sorl_lightning.rollout.pool import GroupPool
from sorl_lightning.types import Task

logger = logging.getLogger(__name__)
States = Sequence[Mapping[str, Any]]  # of the pools of all ranks


class Background:
    """Groups that are played in an event loop while this thread trains.

    Args:
        loop: where they are played.
        engine: generates their turns.
        tasks_per_collection: groups that a collection trains, on all ranks.
        max_staleness: at least 1.
        seed: of the run.
        task_at: the task of a position among all that are drawn: a function of the position alone.
    """

    def __init__(
        self,
        loop: EventLoopThread,
        engine: RolloutEngine,
        tasks_per_collection: int,
        max_staleness: int,
        seed: int,
        task_at: Callable[[int], Task],
    ) -> None:
        self.loop = loop
        self.gate = Gate(engine)
        self.tasks_per_collection = tasks_per_collection
        self.max_staleness = max_staleness
        self.seed = seed
        self.task_at = task_at
        self._pool: GroupPool | None = None
        self._saved: States = ()

    def begin(self, collection: int) -> None:
        """Be ready to train ``collection`` next: after the last one, after a resume, or from scratch.

        Raises:
            ConfigurationError: what a checkpoint holds does not go with today's settings.
        """
        if self._pool is not None and self._pool.collection == collection and not self._saved:
            return
        saved, self._saved = self._saved, ()
        drawn = max([state["drawn"] for state in saved], default=collection * self.tasks_per_collection)
        quota = self.tasks_per_collection // ranks.count()
        self._pool = GroupPool(self.gate, quota, self.max_staleness, collection, drawn)
        if saved:
            self._pool.restore(saved, slice(ranks.index(), None, ranks.count()), self.task_at)

    def play(self, collector: Collector, max_turns: int, collections: int | None) -> None:
        """Start what may start, and wait until the next collection can be trained. Can be repeated after a failure.

        Args:
            collector: plays what starts now, through ``gate``.
            max_turns: most turns of a trajectory of it.
            collections: still to be trained, the next included; None: no end is known.
        """
        pool, world = self._begun(), ranks.count()
        room = pool.room(collections)
        positions = range(pool.drawn + ranks.index(), pool.drawn + room * world, world)
        tasks = {position: self.task_at(position) for position in positions}
        seed = derive_seed(self.seed, "train")
        self.loop.run(pool.advance(collector, tasks, max_turns, seed, pool.drawn + room * world))
        self.loop.run(pool.ready())

    def take(self, policy_version: int) -> Collection:
        """The next collection."""
        return self.loop.run(self._begun().take(policy_version))

    @contextlib.contextmanager
    def new_weights(self, version: int) -> Iterator[None]:
        """Hold new turns back while the engine takes weights. Where that fails they wait for the next attempt."""
        if self._pool is None:
            yield
            return
        self.loop.run(self.gate.hold())
        yield
        self.loop.run(self._pool.loaded(version))
        self.loop.run(self.gate.free())

    def state(self) -> list[dict[str, Any]]:
        """Of the pools of all ranks, in plain containers."""
        return ranks.gather({} if self._pool is None else self.loop.run(self._pool.state()))

    def restore(self, states: States) -> None:
        """Go on from there at the next ``begin``."""
        self._saved = [state for state in states if state]

    def suspend(self) -> None:
        """Stop playing; what has not finished starts anew when playing goes on."""
        if self._pool is None:
            return
        self.loop.run(self._pool.suspend())
        if self._pool.started:
            logger.warning(
                "%d groups were drawn and are not trained; a checkpoint of the last collection has them",
                len(self._pool.started),
            )

    def _begun(self) -> GroupPool:
        assert self._pool is not None, "begin comes first"
        return self._pool


def refuse_leftovers(states: States) -> None:
    """Refuse to forget groups that were drawn, where nothing streams any more.

    Raises:
        ConfigurationError: there are some.
    """
    groups = sum(len(state.get("groups", ())) for state in states)
    if groups:
        raise ConfigurationError(
            f"ckpt_path holds {groups} groups that were drawn and not trained, which data.max_staleness=0 would "
            "forget: resume with the data.max_staleness of before"
        )
