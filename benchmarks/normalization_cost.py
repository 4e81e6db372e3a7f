"""Time of an update with ClippingTriggeredNormalization beside the same update without it.

    python benchmarks/normalization_cost.py --output normalization_cost.json

Real fits on synthetic rows at learning rate 0, so that every update is the same. The versions take turns, round after
round in one process; a ratio is the median over rounds of the ratios within a round.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch

from sorl_lightning.callbacks import ClippingTriggeredNormalization
from sorl_lightning.functional.weights import trajectory_weights
from sorl_lightning.models import Loaded, PolicyNetwork, SmallLlama, recompute_activations
from sorl_lightning.module import AgentModule
from sorl_lightning.objectives import PolicyGradient
from sorl_lightning.streams import Sealed
from sorl_lightning.types import RolloutBatch

# Largest ratio of an update with the callback to one without; a backward pass more is 2/3 of an update.
LIMITS = {
    "nothing clipped": 1.03,
    "clipped": 1.8,
    "clipped, activation checkpointing": 2.2,
    "clipped, KL and entropy": 1.8 + 2 / 3,
}


@dataclass(frozen=True, kw_only=True)
class Model(SmallLlama):
    """A small Llama, with or without activation checkpointing."""

    recompute: bool = False

    def load(self) -> Loaded:
        model, tokenizer = super().load()
        if self.recompute:
            recompute_activations(model)
        return model, tokenizer


class Rows(L.LightningDataModule):
    """The same rows again and again."""

    group_size = 8
    collection = None

    def __init__(self, rows: RolloutBatch, updates: int) -> None:
        super().__init__()
        self.rows = rows
        self.updates = updates

    def __len__(self) -> int:
        return self.updates

    def __iter__(self) -> Iterator[Sealed]:
        return (Sealed(self.rows) for _ in range(self.updates))

    def train_dataloader(self) -> Rows:
        return self

    def transfer_batch_to_device(self, batch: Sealed, device: torch.device, dataloader_idx: int) -> Any:
        return batch.content.to(device)


class Stopwatch(L.Callback):
    """Seconds of each update."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.start = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.start)


def make_rows(arguments: argparse.Namespace, source: Model, clipped: bool, references: bool) -> RolloutBatch:
    """Random rows of four turns each, whose ratios are 1 or, with ``clipped``, far from it."""
    generator = torch.Generator().manual_seed(0)
    shape = (arguments.rows, arguments.tokens)
    model, tokenizer = source.load()
    ids = torch.randint(300, len(tokenizer), shape, generator=generator)
    place = torch.arange(arguments.tokens).expand(shape)
    turn = torch.where(place % 4 == 3, place * 4 // arguments.tokens, -1)
    with torch.no_grad():
        logprobs, _ = PolicyNetwork(model)(ids, place, turn >= 0)
    noise = torch.randn(shape, generator=generator) * (1.0 if clipped else 0.0)
    zeros = torch.zeros(shape)
    return RolloutBatch(
        input_ids=ids,
        position_ids=place,
        turn=turn,
        trajectory=torch.arange(arguments.rows)[:, None].expand(shape),
        behaviour_logprobs=logprobs + noise,
        policy_version=turn.clamp(max=0),
        rewards=zeros,
        advantages=torch.randn(arguments.rows, 1, generator=generator).expand(shape).contiguous(),
        trajectory_weights=trajectory_weights(turn),
        turn_weights=zeros,
        reference_logprobs=logprobs - 0.1 if references else None,
    )


def seconds(arguments: argparse.Namespace, source: Model, rows: RolloutBatch, normalized: bool) -> float:
    """Median seconds of an update."""
    regularized = rows.reference_logprobs is not None
    objective = PolicyGradient(
        ratio="token", kl_coefficient=0.1 if regularized else 0.0, entropy_coefficient=0.01 if regularized else 0.0
    )
    watch = Stopwatch()
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        num_sanity_val_steps=0,
        callbacks=[watch, *([ClippingTriggeredNormalization(rule="max1")] if normalized else [])],
        **dict.fromkeys(quiet, False),
    )
    module = AgentModule(source, objective, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    trainer.fit(module, datamodule=Rows(rows, arguments.updates))
    return statistics.median(watch.seconds[1:])  # the first warms up


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """For each case seconds without and with the callback, and their ratio."""
    results = {}
    for case in LIMITS:
        size = {"hidden_size": arguments.width, "num_hidden_layers": arguments.layers}
        source = Model(tokenizer="sorl:textworld", recompute="checkpointing" in case, **size)
        rows = make_rows(arguments, source, "nothing" not in case, "KL" in case)
        rounds = [[seconds(arguments, source, rows, flag) for flag in (False, True)] for _ in range(arguments.rounds)]
        results[case] = {
            "without": statistics.median(pair[0] for pair in rounds),
            "with": statistics.median(pair[1] for pair in rounds),
            "ratio": statistics.median(pair[1] / pair[0] for pair in rounds),
            "limit": LIMITS[case],
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="where to write the figures, as JSON")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--updates", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    results = measure(arguments)
    print(f"{'':36}{'without':>10}{'with':>10}{'ratio':>10}{'limit':>10}")
    for case, figures in results.items():
        print(f"{case:36}" + "".join(f"{value:10.3f}" for value in figures.values()))
    if arguments.output:
        settings = {key: value for key, value in vars(arguments).items() if key != "output"}
        arguments.output.write_text(json.dumps({"settings": settings, "cases": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
