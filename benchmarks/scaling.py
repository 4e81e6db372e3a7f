"""Throughput of 1 to 64 GPUs at each bound of staleness, by simulation with costs from data sheets; no GPU was measured.

    python -m benchmarks.scaling --output docs/results/scaling/seed0.json
    python -m benchmarks.scaling --set push_bandwidth=1e9 --load sigma=0 --gpus 8 64

Splits of the GPUs between generation and training are ranked by a formula; the first few are simulated, and the best
is reported. What is the bottleneck is asked of the simulation too: which of four remedies would bring most.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.costs import Costs
from benchmarks.simulated import Errands, Trainer
from benchmarks.workload import Equal, Lengths, Load, Servers

from sorl_lightning.rollout.collection import Collection
from sorl_lightning.rollout.pool import GroupPool
from sorl_lightning.testing.virtual_time import run_in_virtual_time

S = TypeVar("S", Costs, Load)


@dataclass(frozen=True, kw_only=True)
class Split:
    """GPUs that generate and GPUs that train; shared: they are the same ones, and take turns."""

    generation: int
    training: int
    shared: bool = False


def splits_of(gpus: int, staleness: int, costs: Costs) -> list[Split]:
    """Those on whose trainer the policy fits. GPUs are shared at staleness 0 only: a server asleep cannot stream."""
    powers = [2**n for n in range(gpus.bit_length())]
    training = sorted({n for n in (*powers, *(gpus - n for n in powers)) if 0 < n < gpus})
    splits = [Split(generation=gpus - n, training=n) for n in training]
    splits += [Split(generation=gpus, training=gpus, shared=True)] if staleness == 0 else []
    return [split for split in splits if costs.fits(split.training)]


def simulate(
    costs: Costs, load: Load, split: Split, staleness: int, seed: int, measured: int, lengths: Lengths | None = None
) -> dict[str, Any]:
    """A run after its first ``staleness + 1`` collections: what a collection takes, and who is busy in it."""
    lengths = lengths or Lengths(load, seed)
    engine = Servers(costs, lengths, split.generation)
    shape = Errands(lambda task: lengths.turns(int(task.id)), load.step_seconds)

    def training(collection: Collection) -> float:
        tokens = sum(lengths.tokens(t.group, t.sibling)[1] for t in collection.trajectories)
        return costs.training(tokens, split.training)

    trainer = Trainer(engine, shape, load.quota, load.siblings, seed, training, costs.push(split.shared))
    first = staleness + 1
    if staleness == 0:
        seconds = run_in_virtual_time(trainer.synchronous(first + measured))
    else:
        pool = GroupPool(trainer.gate, load.quota, staleness, 0, 0)
        seconds = run_in_virtual_time(trainer.streaming(first + measured, pool, end_known=False))
    cycle = (trainer.ends[-1] - trainer.ends[first - 1]) / measured
    trained = trainer.collections[first:]
    generated = sum(lengths.tokens(t.group, t.sibling)[0] for c in trained for t in c.trajectories) / measured
    busy = sum(server.busy for server in engine.servers)
    streams = [c.stream for c in trained if c.stream is not None]
    return {
        **asdict(split),
        "max_staleness": staleness,
        "seconds_per_collection": cycle,
        "collections_per_hour": 3600.0 / cycle,
        "trained_tokens_per_second": generated / cycle,
        "training_busy": sum(map(training, trained)) / measured / cycle,
        "push_share": trainer.push / cycle,
        "generation_busy": busy / seconds / split.generation,
        "requests_per_server": sum(s.request_seconds for s in engine.servers) / max(busy, 1e-12),
        "stalled_share": sum(stream.stalled for stream in streams) / measured / cycle,
        "peak_cache_bytes": costs.kv_bytes * max(server.peak for server in engine.servers),
    }


def estimate(costs: Costs, lengths: Lengths, split: Split, staleness: int) -> float:
    """Seconds of a collection by formula, to rank splits.

    Training, the servers' throughput, and what a trajectory must last from its start to its training each set a floor:
    S + max(T, G, (L + T) / (staleness + 1)); at staleness 0 the last is the whole.
    """
    load = lengths.load
    keys = list(itertools.product(range(4 * load.quota), range(load.siblings)))
    generated, whole = (sum(column) / len(keys) for column in zip(*(lengths.tokens(*k) for k in keys), strict=True))
    number = load.quota * load.siblings
    requests = math.ceil(number / split.generation)
    step = costs.step(requests, requests * whole / 2)
    throughput = generated * step * number / requests / split.generation + costs.prefill(whole - generated) * requests
    longest = sum(max(lengths.tokens(*key)[0] for key in keys[n * number : (n + 1) * number]) for n in range(4)) / 4
    alone = longest * costs.step(max(1, requests // 4), requests * whole / 4) + load.turns[1] * load.step_seconds
    training = costs.training(whole * number, split.training)
    floors = (training, throughput, (max(alone, throughput) + training) / (staleness + 1))
    return costs.push(split.shared) + max(floors)


def gains(
    costs: Costs, load: Load, split: Split, staleness: int, seed: int, measured: int, before: float
) -> dict[str, float]:
    """How much faster collections would be if one thing were better, and all else the same."""
    collections = staleness + 1 + measured
    twice, pushed = asdict(split), dataclasses.replace(costs, push_latency=0, wake_latency=0, push_bandwidth=1e30)
    equal = Equal(Lengths(load, seed), collections * load.quota)
    remedies: dict[str, tuple[Costs, Split, Lengths | None]] = {
        "generation": (costs, Split(**{**twice, "generation": 2 * split.generation}), None),
        "training": (costs, Split(**{**twice, "training": 2 * split.training}), None),
        "push": (pushed, split, None),
        "tail": (costs, split, equal),
    }
    after = {n: simulate(c, load, s, staleness, seed, measured, le) for n, (c, s, le) in remedies.items()}
    # Trajectories that are all alike train as many tokens within rounding of their number of turns.
    return {name: row["trained_tokens_per_second"] / before - 1 for name, row in after.items()}


def best(costs: Costs, load: Load, gpus: int, staleness: int, options: argparse.Namespace) -> dict[str, Any] | None:
    """The row of the best of the splits that the formula puts first."""
    lengths = Lengths(load, options.seed)
    ranked = sorted(splits_of(gpus, staleness, costs), key=lambda s: estimate(costs, lengths, s, staleness))
    few = ranked[: options.candidates]
    if staleness == 0:  # both deployments
        few += [split for split in ranked if split.shared and split not in few]
    rows = [simulate(costs, load, split, staleness, options.seed, options.collections) for split in few]
    if not rows:
        return None
    row = max(rows, key=lambda row: row["trained_tokens_per_second"])
    row |= {"gpus": gpus, "others": [r for r in rows if r is not row]}
    if staleness in options.remedies:
        split = Split(**{name: row[name] for name in ("generation", "training", "shared")})
        speed = row["trained_tokens_per_second"]
        row["gains"] = gains(costs, load, split, staleness, options.seed, options.collections, speed)
        row["bottleneck"] = max(row["gains"], key=row["gains"].__getitem__)
    return row


def show(row: dict[str, Any]) -> str:
    """A line of the page's table."""
    split = "shared" if row["shared"] else f"{row['generation']} + {row['training']}"
    found = ", ".join(f"{name} {gain:+.0%}" for name, gain in row.get("gains", {}).items())
    return (
        f"| {row['gpus']} | {row['max_staleness']} | {split} | {row['trained_tokens_per_second']:,.0f} | "
        f"{row['collections_per_hour']:.0f} | {row['generation_busy']:.2f} | {row['training_busy']:.2f} | "
        f"{row['push_share']:.2f} | {row['requests_per_server']:.0f} | {found} |"
    )


def changed(settings: S, changes: list[str]) -> S:
    """``settings`` with NAME=NUMBER changed; a range is two numbers with a comma between them."""
    for change in changes:
        name, _, value = change.partition("=")
        if name not in asdict(settings) or not value:
            raise SystemExit(
                f"{change!r} must be NAME=NUMBER with a name of {type(settings).__name__}: {', '.join(asdict(settings))}"
            )
        kind = type(getattr(settings, name))
        new = tuple(int(n) for n in value.split(",")) if kind is tuple else kind(float(value))
        settings = dataclasses.replace(settings, **{name: new})
    return settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--remedies", type=int, nargs="*", default=[0, 1, 4], help="bounds at which they are tried")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=NUMBER", help="other costs")
    parser.add_argument("--load", nargs="*", default=[], metavar="NAME=NUMBER", help="another load")
    parser.add_argument("--candidates", type=int, default=2, help="splits that are simulated")
    parser.add_argument("--collections", type=int, default=8, help="that are measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    costs, load = changed(Costs(), options.set), changed(Load(), options.load)
    rows = []
    print(
        "| GPUs | staleness | split | tokens / s | collections / h | generation | training | push | requests | gains |"
    )
    for gpus, staleness in itertools.product(options.gpus, options.staleness):
        row = best(costs, load, gpus, staleness, options)
        rows += [row] if row else []
        print(show(row) if row else f"| {gpus} | {staleness} | no split on which the policy fits |", flush=True)
    if options.output is not None:
        about = {"python": platform.python_version(), "cpu_seconds": time.process_time(), "seed": options.seed,
                 "collections": options.collections, "costs": asdict(costs), "load": asdict(load)}  # fmt: skip
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
