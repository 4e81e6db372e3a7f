"""What the trainer computes on the host for each collection, beside plain loops over tokens that give the same.

    python benchmarks/host_side.py --output host_side.json

Advantages of groups, importance ratios by turn, weights of tokens, and rows out of trajectories. Seconds of CPU, medians
over repeats that alternate between the two.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sorl_lightning.functional.advantages import group_advantages
from sorl_lightning.functional.ratios import importance_ratio
from sorl_lightning.functional.turns import turn_statistics
from sorl_lightning.functional.weights import trajectory_weights, turn_weights
from sorl_lightning.rollout.packing import pack
from sorl_lightning.types import Completion, Ending, RolloutBatch, Task, Trajectory, Turn


def play(trajectories: int, tokens: int, turns: int) -> list[Trajectory]:
    """Trajectories of ``turns`` turns and ``tokens`` tokens, half of them generated."""
    generator = torch.Generator().manual_seed(0)
    size = tokens // turns // 2
    found = []
    for number in range(trajectories):
        ids = torch.randint(1000, (turns, 2, size), generator=generator).tolist()
        logprobs = (-torch.rand(turns, size, generator=generator)).tolist()
        played, prompt = [], ()
        for index, ((context, generated), said) in enumerate(zip(ids, logprobs, strict=True)):
            prompt = (*prompt, *context)
            completion = Completion(
                token_ids=tuple(generated), logprobs=tuple(said), finish_reason="stop", policy_version=(0,) * size
            )
            played.append(
                Turn(
                    index=index, prompt_ids=prompt, completion=completion, text="", observation="", reward=0.1 * index,
                    seconds=0.0,
                )
            )  # fmt: skip
            prompt = (*prompt, *generated)
        reward = sum(turn.reward for turn in played) + number % 5
        found.append(
            Trajectory(
                task=Task(id=str(number // 8)), group=number // 8, sibling=number % 8, turns=tuple(played), reward=reward,
                success=False, ending=Ending.DONE, turn_limit=turns, seed=0,
            )
        )  # fmt: skip
    return found


def loop_advantages(trajectories: list[Trajectory]) -> list[float]:
    groups = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.group].append(trajectory.reward)
    found = []
    for trajectory in trajectories:
        rewards = groups[trajectory.group]
        mean = sum(rewards) / len(rewards)
        spread = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
        found.append((trajectory.reward - mean) / (spread + 1e-6))
    return found


def loop_ratios(new: list[list[float]], old: list[list[float]], turn: list[list[int]]) -> list[list[float]]:
    found = []
    for now, then, turns in zip(new, old, turn, strict=True):
        sums, counts = defaultdict(float), defaultdict(int)
        for left, right, index in zip(now, then, turns, strict=True):
            if index >= 0:
                sums[index] += left - right
                counts[index] += 1
        found.append([math.exp(sums[index] / counts[index]) if index >= 0 else 1.0 for index in turns])
    return found


def loop_weights(turn: list[list[int]]) -> tuple[list[list[float]], list[list[float]]]:
    by_trajectory, by_turn = [], []
    deepest = [max(turns) + 1 for turns in turn]
    survivors = [sum(depth > index for depth in deepest) for index in range(max(deepest))]
    for turns in turn:
        counts = defaultdict(int)
        for index in turns:
            if index >= 0:
                counts[index] += 1
        total = sum(counts.values())
        by_trajectory.append([1 / (len(turn) * total) if index >= 0 else 0.0 for index in turns])
        share = len(survivors)
        by_turn.append([1 / (share * survivors[index] * counts[index]) if index >= 0 else 0.0 for index in turns])
    return by_trajectory, by_turn


def loop_rows(trajectories: list[Trajectory]) -> dict[str, Tensor]:
    rows: dict[str, list[list[Any]]] = defaultdict(list)
    for trajectory in trajectories:
        row: dict[str, list[Any]] = defaultdict(list)
        for turn in trajectory.turns:
            for token in turn.prompt_ids[len(row["input_ids"]) :]:
                row["input_ids"].append(token)
                row["turn"].append(-1)
                row["logprobs"].append(0.0)
            for token, logprob in zip(turn.completion.token_ids, turn.completion.logprobs, strict=True):
                row["input_ids"].append(token)
                row["turn"].append(turn.index)
                row["logprobs"].append(logprob)
        for name, values in row.items():
            rows[name].append(values)
    return {name: torch.tensor(values) for name, values in rows.items()}


def pairs(trajectories: list[Trajectory], rows: RolloutBatch, new: Tensor) -> dict[str, tuple[Callable, Callable]]:
    """For each piece of work the package's function and the loop; both return tensors or lists of the same numbers."""
    counts = turn_statistics(rows.turn, rows.trajectory)
    rewards = torch.tensor([t.reward for t in trajectories])
    groups = torch.tensor([t.group for t in trajectories])
    lists = new.tolist(), rows.behaviour_logprobs.tolist(), rows.turn.tolist()
    ratio = {"level": "turn", "trajectory": rows.trajectory}

    def weights() -> tuple[Tensor, Tensor]:
        turn, trajectory = rows.turn, rows.trajectory
        return trajectory_weights(turn, trajectory, counts), turn_weights(turn, trajectory, counts=counts)

    return {
        "advantages": (lambda: group_advantages(rewards, groups), lambda: loop_advantages(trajectories)),
        "ratios": (
            lambda: importance_ratio(new, rows.behaviour_logprobs, rows.turn, **ratio),
            lambda: loop_ratios(*lists),
        ),
        "weights": (weights, lambda: loop_weights(lists[2])),
        "rows": (lambda: pack(trajectories), lambda: loop_rows(trajectories)),
    }


def check(versions: tuple[Callable, Callable]) -> None:
    """Both must say the same."""
    ours, loop = (version() for version in versions)
    if isinstance(ours, RolloutBatch):
        ours = {"input_ids": ours.input_ids, "turn": ours.turn, "logprobs": ours.behaviour_logprobs}
    else:
        loop = tuple(map(torch.tensor, loop)) if isinstance(ours, tuple) else torch.tensor(loop)
    torch.testing.assert_close(ours, loop, rtol=1e-4, atol=1e-6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    trajectories = play(options.trajectories, options.tokens, options.turns)
    rows = pack(trajectories)
    new = rows.behaviour_logprobs + 0.01 * torch.randn(rows.turn.shape, generator=torch.Generator().manual_seed(1))
    results = {}
    for name, versions in pairs(trajectories, rows, new).items():
        check(versions)
        seconds: tuple[list[float], list[float]] = ([], [])
        for _ in range(options.repeats):
            for version, spent in zip(versions, seconds, strict=True):
                start = time.process_time()
                version()
                spent.append(time.process_time() - start)
        vectorised, loop = map(statistics.median, seconds)
        results[name] = {"seconds": vectorised, "loop_seconds": loop, "ratio": loop / vectorised}
        print(f"{name:12} {1000 * vectorised:8.2f} ms   loop {1000 * loop:8.1f} ms   {loop / vectorised:6.1f}x")
    total = {key: sum(result[key] for result in results.values()) for key in ("seconds", "loop_seconds")}
    results["all"] = {**total, "ratio": total["loop_seconds"] / total["seconds"]}
    print(
        f"{'all':12} {1000 * total['seconds']:8.2f} ms   loop {1000 * total['loop_seconds']:8.1f} ms   {results['all']['ratio']:6.1f}x"
    )
    if options.output:
        settings = {key: value for key, value in vars(options).items() if key != "output"}
        options.output.write_text(
            json.dumps({"settings": settings, "torch": torch.__version__, "results": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
