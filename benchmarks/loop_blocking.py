"""Who holds up the event loop during collections in text worlds, and what the watchdog that says so costs.

    python benchmarks/loop_blocking.py --output loop_blocking.json

The environments and collection sizes of configs, played by a policy of random weights and by the expert. Beside the
watchdog's account stand the longest single calls of the environment and of the chat template. The watchdog's cost: CPU seconds of an idle loop's
process for each second, and CPU time of a pass of a busy loop, with and without it, alternated.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch
import yaml

from sorl_lightning.models import SmallLlama
from sorl_lightning.rollout.chat import Chat, Conversation
from sorl_lightning.rollout.collector import Collector, Sampling
from sorl_lightning.rollout.engine import RolloutEngine
from sorl_lightning.rollout.engines import ExpertEngine, LocalEngine
from sorl_lightning.rollout.environments import TextWorldExpress
from sorl_lightning.rollout.event_loop import EventLoopThread

CONFIGS = Path(__file__).parents[1] / "configs"
CONTEXT = 1024
ENGINES = (LocalEngine, ExpertEngine)  # random weights, whose actions are no actions; and an expert, whose are
longest: dict[str, float] = {}  # call of each timed method, seconds


def timed(owner: type, name: str) -> None:
    """Note the longest call of a method."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def call(*arguments: Any, **settings: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(*arguments, **settings)
        finally:
            key = f"{owner.__name__}.{name}"
            longest[key] = max(longest.get(key, 0.0), time.perf_counter() - start)

    setattr(owner, name, call)


def collections(options: argparse.Namespace, config: str, engine: RolloutEngine) -> dict[str, Any]:
    """Play some of a config, and return the watchdog's account."""
    data = yaml.safe_load((CONFIGS / f"{config}.yaml").read_text())["data"]
    longest.clear()
    environment = TextWorldExpress(**data["environment"]["init_args"])
    network, tokenizer = SmallLlama(tokenizer="sorl:textworld").load()
    sampling = Sampling(max_tokens=data.get("max_tokens", 32), context_limit=CONTEXT, temperature=1.0)
    loop = EventLoopThread()
    collector = Collector(environment, engine, Chat(tokenizer), sampling, data.get("group_size", 8))
    engine.attach(network, tokenizer)
    engine.load_weights(network.named_parameters(), 0)
    tasks = environment.tasks("train")
    wall, cpu = time.perf_counter(), time.process_time()
    for index in range(options.collections):
        first = index * options.tasks
        loop.run(collector.collect(tasks[first : first + options.tasks], data.get("max_turns", 16), index))
    spent = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    engine.close()
    environment.close()
    loop.close()
    places = {
        "not seen" if place is None else place.function: {"blocks": blocks.count, "longest": blocks.longest}
        for place, blocks in loop.watchdog.places.items()
    }
    return {
        "config": config, "engine": type(engine).__name__, **spent, "blocks": loop.watchdog.count,
        "longest": loop.watchdog.longest, "places": places, "calls": dict(longest),
    }  # fmt: skip


class PlainLoop(EventLoopThread):
    """The same without a watchdog."""

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
            self._thread.start()
        return super().submit(coroutine)


def idle(kind: Callable[[], EventLoopThread], seconds: float) -> float:
    """CPU seconds a second of a process whose loop has nothing to do."""
    loop = kind()
    loop.run(asyncio.sleep(0))
    start = time.process_time()
    time.sleep(seconds)
    spent = (time.process_time() - start) / seconds
    loop.close()
    return spent


def busy(kind: Callable[[], EventLoopThread], passes: int) -> float:
    """CPU seconds of one pass of a loop."""

    async def turn_over() -> float:
        start = time.process_time()
        for _ in range(passes):
            await asyncio.sleep(0)
        return (time.process_time() - start) / passes

    loop = kind()
    spent = loop.run(turn_over())
    loop.close()
    return spent


def cost(seconds: float, repeats: int = 5) -> dict[str, dict[str, float]]:
    """Medians."""
    kinds: dict[str, Callable[[], EventLoopThread]] = {"watched": EventLoopThread, "plain": PlainLoop}
    runs: dict[str, dict[str, list[float]]] = {name: {"idle": [], "busy": []} for name in kinds}
    for _ in range(repeats):
        for name, kind in kinds.items():
            runs[name]["idle"].append(idle(kind, seconds))
            runs[name]["busy"].append(busy(kind, 50_000))
    return {name: {key: statistics.median(values) for key, values in run.items()} for name, run in runs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", nargs="+", default=["quickstart", "coin_teacher"])
    parser.add_argument("--collections", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=16, help="of a collection, 8 siblings each")
    parser.add_argument("--idle-seconds", type=float, default=4.0, help="of each of five repeats")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    for owner, name in ((TextWorldExpress, "reset"), (TextWorldExpress, "step"), (Chat, "open")):
        timed(owner, name)
    timed(Conversation, "extend")
    played = [collections(options, config, engine()) for config in options.configs for engine in ENGINES]
    costs = cost(options.idle_seconds)
    for run in played:
        print(
            f"{run['config']}, {run['engine']}: {run['seconds']:.1f} s, {run['cpu_seconds']:.1f} CPU seconds; "
            f"{run['blocks']} blocks; the longest pass {1000 * run['longest']:.0f} ms"
        )
        for place, blocks in run["places"].items():
            print(f"  {place}: {blocks['blocks']} blocks, the longest {1000 * blocks['longest']:.0f} ms")
        for call, seconds in run["calls"].items():
            print(f"  longest call of {call}: {1000 * seconds:.1f} ms")
    for name, spent in costs.items():
        print(f"{name} loop: idle {1000 * spent['idle']:.2f} CPU ms/s, {1e6 * spent['busy']:.1f} us a pass")
    if options.output:
        settings = {key: value for key, value in vars(options).items() if key != "output"}
        about = {"torch": torch.__version__, "threads": torch.get_num_threads(), "cores": os.cpu_count()}
        content = {"settings": settings, **about, "collections": played, "cost": costs}
        options.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
