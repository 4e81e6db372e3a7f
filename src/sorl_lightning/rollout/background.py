"""The pool of groups as the training thread sees it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sorl_lightning import ranks
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.collection import Collection, refuse_empty
from sorl_lightning.rollout.collector import Collector
from sorl_lightning.rollout.engine import RolloutEngine, derive_seed
from sorl_lightning.rollout.event_loop import EventLoopThread
from sorl_lightning.rollout.gate import Gate
from sorl_lightning.rollout.outages import despite_outages
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

    def collect(
        self, index: int, ready: Callable[[], Collector], max_turns: int, collections: int | None, version: int
    ) -> Collection:
        """Start what may start, and take the groups that finish next; the others play on.

        Args:
            index: of the collection, which is trained next.
            ready: loads the engine's weights under ``new_weights``; the collector of what starts now, through ``gate``.
            max_turns: most turns of a trajectory that starts now.
            collections: still to be trained, this one included; None: no end is known.
            version: of the policy's weights.

        Raises:
            ConfigurationError: what a checkpoint holds does not go with today's settings.
            RolloutError: all groups failed, or the engine did for good.
        """
        pool = ranks.together(lambda: self._begin(index))
        despite_outages(lambda: self._play(pool, ready(), max_turns, collections))
        collection = ranks.together(lambda: self.loop.run(pool.take(version)))
        refuse_empty(collection, self.tasks_per_collection)
        return collection

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
        """Go on from there at the next collection."""
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

    def _begin(self, collection: int) -> GroupPool:
        """The pool for ``collection``: after the last one, after a resume, or from scratch."""
        if self._pool is not None and self._pool.collection == collection and not self._saved:
            return self._pool
        saved, self._saved = self._saved, ()
        drawn = max([state["drawn"] for state in saved], default=collection * self.tasks_per_collection)
        quota = self.tasks_per_collection // ranks.count()
        self._pool = GroupPool(self.gate, quota, self.max_staleness, collection, drawn)
        if saved:
            self._pool.restore(saved, slice(ranks.index(), None, ranks.count()), self.task_at)
        return self._pool

    def _play(self, pool: GroupPool, collector: Collector, max_turns: int, collections: int | None) -> None:
        """Start what may start, and wait until the next collection can be trained. Can be repeated after a failure."""
        room, world = pool.room(collections), ranks.count()
        positions = range(pool.drawn + ranks.index(), pool.drawn + room * world, world)
        tasks = {position: self.task_at(position) for position in positions}
        seed = derive_seed(self.seed, "train")
        self.loop.run(pool.advance(collector, tasks, max_turns, seed, pool.drawn + room * world))
        self.loop.run(pool.ready())


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
