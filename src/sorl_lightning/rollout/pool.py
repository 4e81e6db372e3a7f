"""Groups that are played while others train: started within a bound of staleness, taken whole, carried over."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sorl_lightning.errors import ConfigurationError, EngineOutage
from sorl_lightning.functional.staleness import admissible, chosen, may_push, on_time
from sorl_lightning.rollout.collection import Collection
from sorl_lightning.rollout.collector import Collector, Opening
from sorl_lightning.rollout.gate import Gate
from sorl_lightning.rollout.gathering import together
from sorl_lightning.rollout.guarded_episode import EnvironmentFailure
from sorl_lightning.rollout.started_group import StartedGroup
from sorl_lightning.rollout.stream_figures import StreamFigures
from sorl_lightning.rollout.weight_ages import WeightAges
from sorl_lightning.types import Task

logger = logging.getLogger(__name__)


class GroupPool:
    """The groups of a run that have started and are not trained. Its coroutines share one event loop.

    A collection's turn is ``loaded``, ``advance``, ``ready``, ``take``. The first three can be repeated when one of
    them, or their like on another rank, has failed.

    Args:
        gate: the engine.
        quota: groups that a collection trains.
        max_staleness: most collections between the weights that sampled a token and those that train on it.
        collection: the first to be trained.

    Attributes:
        collection: the next to be trained.
        drawn: tasks drawn so far, by all ranks of the run.
        started: groups by the position of their task among all that are drawn, in the order in which they started.
    """

    def __init__(self, gate: Gate, quota: int, max_staleness: int, collection: int, drawn: int) -> None:
        self.gate = gate
        self.quota = quota
        self.max_staleness = max_staleness
        self.collection = collection
        self.drawn = drawn
        self.started: dict[int, StartedGroup] = {}
        self._ages = WeightAges()
        self._playing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        self._waited = self._stalled = 0.0
        self._restarted = 0
        self._taken_at: float | None = None

    def room(self, collections: int | None) -> int:
        """Groups that may start now.

        Args:
            collections: still to be trained, the next included; None: no end is known. No more groups start than they
                train, so that none is left over.
        """
        room = admissible(self._dues(), self.quota, self.collection, self.max_staleness)
        return room if collections is None else min(room, self.quota * collections - len(self.started))

    async def loaded(self, version: int) -> None:
        """Note that the engine has weights ``version``, which are of the start of the next collection."""
        if not may_push(self._dues(finished=False), self.collection):
            raise RuntimeError(f"a group was to be trained before collection {self.collection}, and is not finished")
        self._ages.note(version, self.collection)

    async def advance(
        self, collector: Collector, tasks: Mapping[int, Task], max_turns: int, seed: int, drawn: int
    ) -> None:
        """Start a group of each of ``tasks``, by position, and start those anew that were interrupted.

        Args:
            collector: plays them; its engine is the gate.
            max_turns: most turns of a trajectory; groups that are started anew keep their own limit.
            seed: every token of a group depends on it, its position, the sibling and the turn.
            drawn: tasks drawn by all ranks, these included.

        Raises:
            RolloutError: a group has failed for good, and not for the loss of the engine.
        """
        if self._error is not None and not isinstance(self._error, EngineOutage):
            raise self._error
        if self._error is not None:
            logger.warning("%s; the groups in the making start again", self._error)
            await self.suspend()
        again = {} if self._playing else {p: g for p, g in self.started.items() if not g.finished}
        for group in again.values():
            group.collection = self.collection
        self._restarted += len(again)
        # What was interrupted starts now, and so goes behind what did not stop.
        self.started = {p: g for p, g in self.started.items() if p not in again} | again
        fresh = {p: StartedGroup(task=t, collection=self.collection, max_turns=max_turns) for p, t in tasks.items()}
        self.started |= fresh
        self.drawn = drawn
        if again or fresh:
            playing = asyncio.ensure_future(self._play(collector, again | fresh, seed, self.collection))
            self._playing.add(playing)
            playing.add_done_callback(self._playing.discard)

    async def ready(self) -> None:
        """Wait until the next collection can be trained: enough groups have finished, and all that are due.

        Raises:
            EngineOutage: the engine was lost; ``advance`` starts again what it was playing.
            RolloutError: a group has failed for good otherwise.
        """
        clock = asyncio.get_running_loop().time
        start, enough = clock(), None
        while self._choice() is None:
            if self._error is not None:
                raise self._error
            if enough is None and self._finished() >= self.quota:
                enough = clock()
            self._changed.clear()
            await self._changed.wait()
        self._waited += clock() - start
        self._stalled += 0.0 if enough is None else clock() - enough

    async def take(self, policy_version: int) -> Collection:
        """The next collection, whose groups leave the pool.

        Raises:
            RolloutError: a token is older than the bound, or of weights that were never loaded.
        """
        choice = self._choice()
        assert choice is not None, "take comes after ready"
        taken = [self.started.pop(position).outcome for position in choice]
        trajectories = [t for group in taken if isinstance(group, tuple) for t in group]
        ages = [self._ages.staleness(trajectory, self.collection) for trajectory in trajectories]
        now = asyncio.get_running_loop().time()
        collection = Collection(
            index=self.collection,
            trajectories=tuple(sorted(trajectories, key=lambda t: (t.group, t.sibling))),
            failures=tuple(str(group) for group in taken if isinstance(group, EnvironmentFailure)),
            policy_version=policy_version,
            seconds=self._waited if self._taken_at is None else now - self._taken_at,
            stream=StreamFigures(
                trajectories=len(ages),
                staleness_sum=float(sum(ages)),
                staleness_max=max(ages, default=0),
                waited=self._waited,
                stalled=self._stalled,
                carried=len(self.started) - self._finished(),
                outstanding=len(self.started),
                restarted=self._restarted,
            ),
        )
        self._waited, self._stalled, self._restarted, self._taken_at = 0.0, 0.0, 0, now
        self.collection += 1
        self._ages.forget_before(self.collection - self.max_staleness)
        return collection

    async def suspend(self) -> None:
        """Stop playing. What has finished is kept; what has not starts anew at the next ``advance``."""
        for playing in list(self._playing):
            playing.cancel()
        await asyncio.gather(*self._playing, return_exceptions=True)
        self._playing.clear()
        self.gate.close()
        self._error = None

    async def state(self) -> dict[str, Any]:
        """All that a resumed run needs, in plain containers."""
        return {
            "collection": self.collection,
            "drawn": self.drawn,
            "versions": dict(self._ages.begun_by),
            "groups": [group.record(position) for position, group in self.started.items()],
        }

    def restore(self, states: Sequence[Mapping[str, Any]], share: slice, task_at: Callable[[int], Task]) -> None:
        """Take up this rank's share of what all ranks had in their pools.

        Args:
            states: of each rank.
            share: of the groups of all ranks in the order in which they are due.
            task_at: the task of a position.

        Raises:
            ConfigurationError: under today's settings they cannot all be trained in time, or tasks are others.
        """
        versions = {int(version): begun for state in states for version, begun in state["versions"].items()}
        self._ages = WeightAges(versions)
        records = sorted(
            (r for state in states for r in state["groups"]), key=lambda r: (r["collection"], r["position"])
        )
        for record in records[share]:
            self.started[record["position"]] = StartedGroup.of(record, task_at(record["position"]))
        if not on_time(self._dues(), self.quota, self.collection):
            raise ConfigurationError(
                f"ckpt_path holds {len(records)} groups that were drawn and not trained, too many for "
                f"data.max_staleness={self.max_staleness} and data.tasks_per_collection: resume with those of before"
            )

    def _dues(self, finished: bool = True) -> list[int]:
        return [g.collection + self.max_staleness for g in self.started.values() if finished or not g.finished]

    def _finished(self) -> int:
        return sum(group.finished for group in self.started.values())

    def _choice(self) -> list[int] | None:
        """Positions of the groups that the next collection trains; None while some of them are played."""
        if self._finished() < self.quota:
            return None
        finished = [group.finished for group in self.started.values()]
        choice = chosen(self._dues(), finished, self.quota, self.collection)
        positions = list(self.started)
        return None if choice is None else [positions[index] for index in choice]

    async def _play(self, collector: Collector, groups: Mapping[int, StartedGroup], seed: int, index: int) -> None:
        """Play ``groups`` to their ends; the first error, which is not an environment's, ends them all."""

        async def play(group: StartedGroup, opening: Opening) -> None:
            group.outcome = await collector.play_group(dataclasses.replace(opening, max_turns=group.max_turns))
            self._changed.set()

        try:
            tasks = {position: group.task for position, group in groups.items()}
            openings = await collector.open_groups(tasks, collector.sampling.context_limit, seed, index)
            await together([play(g, opening) for g, opening in zip(groups.values(), openings, strict=True)])
        except Exception as error:
            self._error = self._error or error
            self._changed.set()
