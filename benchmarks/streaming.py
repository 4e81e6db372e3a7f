"""What streaming is worth, with a simulated engine and trainer in virtual time: exact, and over in seconds.

    python -m benchmarks.streaming --seed 0 --output docs/results/streaming/seed0.json

Collector, pool and decisions are the product's own; turns and training steps are sleeps on a clock that jumps. The
engine works on so many turns at once as a collection has trajectories, first come, first served.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import platform
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.simulated import Errands, SimulatedEngine, Trainer, one_token, position_of

from sorl_lightning.rollout.engine import GenerationRequest, derive_seed
from sorl_lightning.rollout.pool import GroupPool
from sorl_lightning.testing.virtual_time import run_in_virtual_time
from sorl_lightning.types import Completion


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is generated and trained.

    Attributes:
        quota: groups of a collection; siblings: trajectories of a group.
        turns: of each trajectory; the task's payload adds to it.
        median: seconds of a turn; sigma: of its logarithm; 0 makes all turns equal.
        slow: share of slow tasks; factor: how much slower their turns are.
        training: seconds that a collection trains.
    """

    quota: int = 8
    siblings: int = 2
    turns: int = 4
    median: float = 1.0
    sigma: float = 0.0
    slow: float = 0.0
    factor: float = 1.0
    training: float = 4.0


class Clockwork(SimulatedEngine):
    """Turns of one token that take their time; how long follows from the request's seed and its task."""

    def __init__(self, load: Load, seed: int) -> None:
        self.load = load
        self.seed = seed
        self.busy = 0.0
        self._slots = asyncio.Semaphore(load.quota * load.siblings)

    async def generate(self, request: GenerationRequest) -> Completion:
        generator = random.Random(request.seed)
        seconds = self.load.median * math.exp(self.load.sigma * generator.gauss(0, 1))
        async with self._slots:
            version = self.version  # the token is sampled when the turn begins: the oldest that it can be
            slow = is_slow(self.load, self.seed, position_of(request.trajectory))
            seconds *= self.load.factor if slow else 1.0
            self.busy += seconds
            await asyncio.sleep(seconds)
        return one_token(version)


def is_slow(load: Load, seed: int, position: int) -> bool:
    """Whether the task at this position of the run is a slow one."""
    return random.Random(derive_seed(seed, "slow", position)).random() < load.slow


class InOrder(GroupPool):
    """A barrier: every collection waits for the groups that started first, whatever else has finished."""

    def _choice(self) -> list[int] | None:
        first = list(self.started.items())[: self.quota]
        whole = len(first) == self.quota and all(group.outcome is not None for _, group in first)
        return [position for position, _ in first] if whole else None


def trainer_of(load: Load, seed: int) -> tuple[Trainer, Clockwork]:
    """A trainer of this load, and its engine."""
    engine = Clockwork(load, seed)
    environment = Errands(lambda task: load.turns)
    return Trainer(engine, environment, load.quota, load.siblings, seed, lambda _: load.training), engine


def measure(
    load: Load, seed: int, collections: int, staleness: int, kind: Callable[..., GroupPool] = GroupPool
) -> dict[str, Any]:
    """Seconds of a run, and what it showed."""
    trainer, engine = trainer_of(load, seed)
    if staleness == 0:
        seconds = run_in_virtual_time(trainer.synchronous(collections))
        left = 0
    else:
        pool = kind(trainer.gate, load.quota, staleness, 0, 0)
        seconds = run_in_virtual_time(trainer.streaming(collections, pool))
        left = len(pool.started)
    streams = [collection.stream for collection in trainer.collections if collection.stream is not None]
    busy = engine.busy / (seconds * load.quota * load.siblings)
    trained = [t.group for collection in trainer.collections for t in collection.trajectories if t.sibling == 0]
    assert sorted(trained) == list(range(collections * load.quota))
    return {
        "max_staleness": staleness,
        "barrier": staleness == 0 or kind is InOrder,
        "seconds": seconds,
        "engine_busy": busy,
        "staleness": sum(s.staleness_sum for s in streams) / max(sum(s.trajectories for s in streams), 1),
        "staleness_max": max((s.staleness_max for s in streams), default=0),
        "stall_seconds": sum(s.stalled for s in streams),
        "stalls": sum(s.stalled > 0 for s in streams),
        "carried_groups": sum(s.carried for s in streams) / collections,
        "outstanding_at_the_end": left,
    }


def shares(load: Load, seed: int, collections: int, staleness: int, end_known: bool) -> dict[str, Any]:
    """Slow tasks among those drawn and among those trained."""
    trainer, _ = trainer_of(load, seed)
    pool = GroupPool(trainer.gate, load.quota, staleness, 0, 0)
    run_in_virtual_time(trainer.streaming(collections, pool, end_known))
    slow = [is_slow(load, seed, position) for position in range(pool.drawn)]
    trained, gaps = [], []
    for number, collection in enumerate(trainer.collections, start=1):
        trained += [slow[t.group] for t in collection.trajectories if t.sibling == 0]
        drawn = slow[: min(number + staleness, collections if end_known else number + staleness) * load.quota]
        gaps.append(sum(trained) / len(trained) - sum(drawn) / len(drawn))
    return {
        "max_staleness": staleness,
        "end_known": end_known,
        "drawn": pool.drawn,
        "drawn_slow_share": sum(slow) / len(slow),
        "trained_slow_share": sum(trained) / len(trained),
        "largest_gap_after_20_collections": max(map(abs, gaps[20:])),
        "outstanding_at_the_end": len(pool.started),
        "stalls": sum(c.stream is not None and c.stream.stalled > 0 for c in trainer.collections),
    }


LOADS = {
    # As long to generate as to train.
    "overlap": Load(),
    # Without training there is nothing to overlap with: what the tail costs is all there is.
    "tail": Load(sigma=1.0, training=0.0),
    "shares": Load(sigma=0.5, slow=0.2, factor=5.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("streaming.json"))
    parser.add_argument("--collections", type=int, default=50)
    parser.add_argument("--long", type=int, default=200, help="collections of the run whose shares are counted")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    results: dict[str, Any] = {
        "python": platform.python_version(),
        "collections": options.collections,
        "seed": options.seed,
        "loads": {name: asdict(load) for name, load in LOADS.items()},
    }
    for name, kinds in (("overlap", [(s, GroupPool) for s in (0, 1, 2)]),
                        ("tail", [(s, k) for k in (GroupPool, InOrder) for s in range(5)])):  # fmt: skip
        rows = [
            measure(LOADS[name], options.seed, options.collections, s, k) for s, k in kinds if k is not InOrder or s
        ]
        for row in rows:
            row["speed_over_synchronous"] = rows[0]["seconds"] / row["seconds"]
        results[name] = rows
    results["shares"] = [
        shares(LOADS["shares"], options.seed, options.long, staleness, end_known)
        for staleness, end_known in ((2, True), (4, True), (4, False))
    ]
    for name in ("overlap", "tail", "shares"):
        for row in results[name]:
            print(name, json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
