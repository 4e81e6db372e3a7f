"""Made-up runs of a known content, for the report's tests."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from torch.utils.tensorboard import SummaryWriter

from sorl_lightning.trajectory_files import SCHEMA, TrajectoryFiles

WORDS = ["open", " door", " take", " the", " coin", " north", "</script>", "<b>", "é", "\n"]
ENDINGS = ["done", "turn_limit", "context_limit"]


def write_run(
    folder: Path,
    seed: int = 0,
    collections: int = 12,
    trajectories: int = 24,
    depth_control: bool = False,
    config: dict[str, Any] | None = None,
) -> Path:
    """Event files, config.yaml and a trajectory log, as a run of ``collections`` with two updates each has them."""
    draw, start = random.Random(seed), time.time()
    main = {
        "rollout/success": lambda c: c / collections, "rollout/return": lambda c: 2 * c / collections,
        "rollout/tokens": lambda c: 30 + draw.random(), "rollout/seconds": lambda c: 4 + draw.random(),
        "rollout/turns": lambda c: 4 + draw.random(), "rollout/turn_limit": lambda c: 6.0,
        "throughput/generated_tokens_per_second": lambda c: 900 + 50 * draw.random(),
        "train/clip_fraction": lambda c: 0.2 * draw.random(), "train/ratio": lambda c: 1 + 0.05 * draw.random(),
        "train/ratio_max": lambda c: 2 + 30 * draw.random(), "train/entropy": lambda c: 1.5 - c / collections,
        "clipping/policy_norm": lambda c: 1 + draw.random(), "clipping/bias_norm": lambda c: draw.random(),
    }  # fmt: skip
    main |= {f"turns/ratio/{turn}": lambda c, t=turn: 1 + 0.02 * t * draw.random() for turn in range(5)}
    main |= {f"turns/clip_fraction/{turn}": lambda c, t=turn: 0.05 * t * draw.random() for turn in range(5)}
    if depth_control:
        main |= {"depth/cap": lambda c: 3.0 + c // 4, "depth/smoothed": lambda c: 3 + c / 4}
    main["kl_schedule/turn_blend"] = lambda c: float(depth_control) * c / collections
    with SummaryWriter(str(folder)) as writer, SummaryWriter(str(folder / "by_collection")) as second:
        for collection in range(collections):
            for tag, value in main.items():
                number = float(np.float32(value(collection)))
                writer.add_scalar(tag, number, 2 * collection, walltime=start + 30 * collection)
                second.add_scalar(tag, number, collection, walltime=start + 30 * collection)
            if collection % 4 == 3:
                value, moment = collection / collections, start + 10 + 30 * collection
                writer.add_scalar("val/success", value, 2 * collection, walltime=moment)
                second.add_scalar("val/success", value, collection, walltime=moment)
    (folder / "config.yaml").write_text(yaml.safe_dump(config or settings()))
    TrajectoryFiles(folder / "trajectories").append(record(number, draw, collections) for number in range(trajectories))
    return folder


def settings(ratio: str = "turn", **data: Any) -> dict[str, Any]:
    """A config with a class and callbacks in it."""
    monitor = {"class_path": "sorl_lightning.callbacks.ClippingMonitor", "init_args": {"turns": 16}}
    objective = {
        "class_path": "sorl_lightning.objectives.PolicyGradient",
        "init_args": {"ratio": ratio, "kl_coefficient": None},
    }
    return {
        "trainer": {"max_epochs": 12, "callbacks": [monitor]},
        "model": {"objective": objective},
        "data": {"group_size": 8, **data},
    }


def record(number: int, draw: random.Random, collections: int) -> dict[str, Any]:
    """A line of the log; every third is a success, every fifth says "treasure"."""
    turns = [turn(index, draw, number) for index in range(draw.randint(2, 5))]
    if number % 5 == 0:
        turns[0]["observation"] = "there is a Treasure here"
    return {
        "schema": SCHEMA, "collection": number % collections, "policy_version": 2 * (number % collections),
        "task": f"task {number % 40} <i>", "group": number % 16, "sibling": number // 16, "seed": number,
        "reward": round(draw.random(), 3), "success": number % 3 == 0, "ending": ENDINGS[number % 3], "turn_limit": 6,
        "metrics": {}, "update": number % 2, "prompt": "<user> find the coin </user>", "turns": turns,
    }  # fmt: skip


def turn(index: int, draw: random.Random, number: int) -> dict[str, Any]:
    """Four to twelve tokens; an expert plays the first turn of every seventh trajectory."""
    count = draw.randint(4, 12)
    trained = index > 0 or number % 7 > 0
    tokens: dict[str, Any] = {
        "id": [draw.randrange(1000) for _ in range(count)], "piece": [draw.choice(WORDS) for _ in range(count)],
        "logprob": [-draw.random() for _ in range(count)], "policy_version": [0] * count,
        "mask": [int(trained)] * count,
    }  # fmt: skip
    if trained:
        ratios = [draw.lognormvariate(0, 0.2) for _ in range(count)]
        tokens |= {
            "ratio": ratios, "advantage": [draw.gauss(0, 1)] * count, "entropy": [draw.random() for _ in range(count)],
            "policy_kl": [draw.random() / 50 for _ in range(count)], "clipped": [int(abs(r - 1) > 0.2) for r in ratios],
        }  # fmt: skip
    return {
        "index": index, "author": "policy" if trained else "expert", "prompt_tokens": 40 * (index + 1),
        "text": "".join(tokens["piece"]), "observation": f"you see room {index}", "reward": 0.0, "seconds": 0.2,
        "finish_reason": "stop", "tokens": tokens,
    }  # fmt: skip
