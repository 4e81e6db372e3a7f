"""The simulator against a real run: costs from some of its collections, seconds of the others predicted.

    python -m benchmarks.small_run --policy runs/quickstart_imitation/policy --max-staleness 0 --output staleness0.json
    python -m benchmarks.small_run --policy runs/quickstart_imitation/policy --max-staleness 1 --output staleness1.json
    python -m benchmarks.scaling_check staleness0.json staleness1.json --output check.json

Costs and the lengths of turns come from the even collections of the first run alone; the odd ones of it, and the whole
second run, are predicted. The first two collections of a run are its warming up and count nowhere.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from benchmarks.simulated import Errands, SimulatedEngine, Trainer, one_token, position_of

from sorl_lightning.rollout.collection import Collection
from sorl_lightning.rollout.engine import GenerationRequest, TrajectoryKey, derive_seed
from sorl_lightning.rollout.pool import GroupPool
from sorl_lightning.testing.virtual_time import run_in_virtual_time
from sorl_lightning.types import Completion, Task

WARMING = 2
Record = dict[str, Any]  # a collection, as benchmarks/small_run.py writes it


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds that a run showed.

    Attributes:
        step: of a decode step of a round; request: of a turn beside it, the environment's share included.
        opening: of an episode; token: of training, for a generated token; loading: of new weights.
    """

    step: float
    request: float
    opening: float
    token: float
    loading: float


def fit(records: Sequence[Record]) -> Measured:
    """Least squares over rounds of turns, and means of what is left."""
    rounds = [r for record in records for r in record["rounds"]]
    features = np.array([[r["longest"], r["requests"]] for r in rounds], dtype=float)
    step, request = np.linalg.lstsq(features, np.array([r["seconds"] for r in rounds]), rcond=None)[0]
    if min(step, request) < 0:
        raise SystemExit(f"rounds cost {step:.2g} s a step and {request:.2g} s a request: too noisy to predict from")
    opening = sum(record["collecting"] - sum(r["seconds"] for r in record["rounds"]) for record in records)
    training = sum(record["seconds"] - record["collecting"] - record["loading"] for record in records)
    return Measured(
        step=float(step),
        request=float(request),
        opening=opening / sum(len(record["turns"]) for record in records),
        token=training / sum(map(generated, records)),
        loading=mean(record["loading"] for record in records),
    )


def generated(record: Record) -> int:
    """Tokens of a collection."""
    return sum(map(sum, record["turns"]))


class Rounds(SimulatedEngine):
    """LocalEngine's rule: when every open trajectory has asked for a turn, all are decoded, for as long as the longest.

    Weights come between two rounds.
    """

    def __init__(self, costs: Measured, drawn: Drawn) -> None:
        self.costs = costs
        self.drawn = drawn
        self.lock = asyncio.Lock()
        self._open: dict[TrajectoryKey, int] = {}  # turns so far
        self._waiting: list[tuple[TrajectoryKey, asyncio.Future[int]]] = []

    def open(self, trajectory: TrajectoryKey) -> None:
        self._open[trajectory] = 0

    def release(self, trajectory: TrajectoryKey) -> None:
        self._open.pop(trajectory, None)
        self._close_round()

    async def stop_for(self, seconds: float) -> None:
        async with self.lock:
            await asyncio.sleep(seconds)

    async def generate(self, request: GenerationRequest) -> Completion:
        version: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((request.trajectory, version))
        self._close_round()
        return one_token(await version)

    def _close_round(self) -> None:
        if self._waiting and len(self._waiting) == len(self._open):
            ready, self._waiting = self._waiting, []
            self._round = asyncio.ensure_future(self._decode(ready))

    async def _decode(self, ready: list[tuple[TrajectoryKey, asyncio.Future[int]]]) -> None:
        turns = {key: self._open[key] for key, _ in ready}
        longest = max(self.drawn.trajectory(position_of(k), k.sibling)[turn] for k, turn in turns.items())
        first = sum(turn == 0 for turn in turns.values())
        async with self.lock:
            seconds = self.costs.step * longest + self.costs.request * len(ready) + self.costs.opening * first
            await asyncio.sleep(seconds)
            for key, version in ready:
                self._open[key] += 1
                version.set_result(self.version)


class Drawn:
    """Trajectories drawn from those of a run, with replacement."""

    def __init__(self, trajectories: Sequence[Sequence[int]], seed: int) -> None:
        self.trajectories = trajectories
        self.seed = seed
        self._siblings: Counter[int] = Counter()

    def trajectory(self, position: int, sibling: int) -> Sequence[int]:
        """Tokens of its turns."""
        return random.Random(derive_seed(self.seed, position, sibling)).choice(self.trajectories)

    def turns(self, task: Task) -> int:
        """Turns of the task's next sibling: the collector opens them in order."""
        sibling = self._siblings[int(task.id)]
        self._siblings[int(task.id)] += 1
        return len(self.trajectory(int(task.id), sibling))


def predict(
    costs: Measured, records: Sequence[Record], quota: int, staleness: int, seed: int, collections: int
) -> float:
    """Seconds of a collection, over so many after the first three."""
    siblings = len(records[0]["turns"]) // quota
    drawn = Drawn(list(itertools.chain.from_iterable(record["turns"] for record in records)), seed)

    def training(collection: Collection) -> float:
        return costs.token * sum(sum(drawn.trajectory(t.group, t.sibling)) for t in collection.trajectories)

    engine = Rounds(costs, drawn)
    trainer = Trainer(engine, Errands(drawn.turns), quota, siblings, seed, training, costs.loading)
    if staleness == 0:
        run_in_virtual_time(trainer.synchronous(3 + collections))
    else:
        pool = GroupPool(trainer.gate, quota, staleness, 0, 0)
        run_in_virtual_time(trainer.streaming(3 + collections, pool, end_known=False))
    return (trainer.ends[-1] - trainer.ends[2]) / collections


def compare(costs: Measured, known: Sequence[Record], run: Record, records: Sequence[Record], seed: int) -> Record:
    """Prediction and measurement."""
    staleness, quota = run["settings"]["max_staleness"], run["settings"]["tasks"]
    predicted = predict(costs, known, quota, staleness, seed, 40)
    seconds = [record["seconds"] for record in records]
    return {
        "max_staleness": staleness,
        "collections": [record["collection"] for record in records],
        "predicted_seconds": predicted,
        "measured_seconds": mean(seconds),
        "measured_deviation": stdev(seconds),
        "predicted_over_measured": predicted / mean(seconds),
        "tokens_known": mean(map(generated, known)),
        "tokens_measured": mean(map(generated, records)),
        "measured_cpu_seconds": mean(record["cpu_seconds"] for record in records),
        "load_average": mean(record["load_average"] for record in records),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="files of benchmarks.small_run, that of staleness 0 first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    runs = [json.loads(path.read_text()) for path in options.runs]
    first = [record for record in runs[0]["collections"] if record["collection"] >= WARMING]
    known = [record for record in first if record["collection"] % 2 == 0]
    costs = fit(known)
    print(json.dumps(asdict(costs)))
    # The last collection of a streaming run has no other beside it.
    unseen = [[r for r in first if r["collection"] % 2], *(run["collections"][WARMING:-1] for run in runs[1:])]
    rows = [compare(costs, known, run, records, options.seed) for run, records in zip(runs, unseen, strict=True)]
    for row in rows:
        print(json.dumps({name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}))
    if options.output is not None:
        options.output.write_text(
            json.dumps({"costs": asdict(costs), "seed": options.seed, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
