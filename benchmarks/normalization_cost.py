"""Time of an update with ClippingTriggeredNormalization beside the same update without it.

    python benchmarks/normalization_cost.py --output normalization_cost.json

Real fits on scripted rollouts at learning rate 0, so that every update is the same. The callback acts in every other
update; a ratio is the median over those updates of their time over the mean of the two beside them. Time is that of the
processor, so that of other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import random
import statistics
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch

from sorl_lightning.callbacks import ClippingTriggeredNormalization
from sorl_lightning.datamodule import RolloutDataModule
from sorl_lightning.models import Loaded, SmallLlama, recompute_activations
from sorl_lightning.module import AgentModule
from sorl_lightning.objectives import PolicyGradient
from sorl_lightning.rollout.engine import GenerationRequest, RolloutEngine, TrajectoryKey
from sorl_lightning.rollout.environment import Environment, Step
from sorl_lightning.types import Completion, Message, Task

TURNS = 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is in the loss, and how large the ratio may be: ``limit``, and ``backwards`` backward passes more.

    Ratios are 1 unless ``clipped``; ``regularized`` adds KL and entropy.
    """

    limit: float
    backwards: int = 0
    clipped: bool = True
    recompute: bool = False
    regularized: bool = False
    micro_batches: int = 1


CASES = {
    "nothing clipped": Case(limit=1.03, clipped=False),
    "all clipped": Case(limit=1.8),
    "all clipped, 4 micro-batches": Case(limit=1.8, micro_batches=4),
    "all clipped, checkpointing": Case(limit=2.2, recompute=True),
    "nothing clipped, KL and entropy": Case(limit=1.03, backwards=1, clipped=False, regularized=True),
    "all clipped, KL and entropy": Case(limit=1.8, backwards=1, regularized=True),
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


class Corridor(Environment):
    """Four doors, one a turn; each is described in as many words, and the last is worth its trajectory's luck."""

    def __init__(self, words: int) -> None:
        self.words = words

    def tasks(self, split: str) -> list[Task]:
        return [Task(id=f"{split}-{index}", payload=index) for index in range(64)]

    def reset(self, task: Task) -> list[Message]:
        self.doors = TURNS
        return [Message(role="user", content="door " * self.words)]

    def step(self, text: str) -> Step:
        self.doors -= 1
        return Step("door " * self.words, float(len(text) % 3), self.doors == 0)


class Scribe(RolloutEngine):
    """Random tokens, with made-up log-probabilities that any policy's are far from."""

    def attach(self, policy: Any, tokenizer: Any) -> None:
        self.vocabulary = len(tokenizer)

    def load_weights(self, weights: Iterable[Any], version: int) -> None:
        self.version = version

    def open(self, trajectory: TrajectoryKey) -> None: ...

    def release(self, trajectory: TrajectoryKey) -> None: ...

    def close(self) -> None: ...

    async def generate(self, request: GenerationRequest) -> Completion:
        generator = random.Random(request.seed)
        ids = tuple(generator.randrange(300, self.vocabulary) for _ in range(request.max_tokens))
        return Completion(
            token_ids=ids,
            logprobs=tuple(-generator.uniform(2.0, 12.0) for _ in ids),
            finish_reason="length",
            policy_version=(self.version,) * len(ids),
        )


class Alternating(ClippingTriggeredNormalization):
    """Acts in every other update; the seconds of each update."""

    def __init__(self) -> None:
        super().__init__(rule="max1")
        self.seconds: list[float] = []
        self.backwards: list[float] = []  # seconds of the loss's own backward passes
        self.clipped: list[float] = []  # share of each micro-batch's tokens

    def acts(self) -> bool:
        return len(self.seconds) % 2 == 1

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.start, self.backward = time.process_time(), 0.0
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_before_backward(self, trainer: L.Trainer, pl_module: Any, loss: Any) -> None:
        terms = pl_module.loss_terms
        self.clipped.append(float(terms.clipped.sum() / (terms.weights > 0).sum()))
        if self.acts():
            super().on_before_backward(trainer, pl_module, loss)
        self.before = time.process_time()

    def on_after_backward(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.backward += time.process_time() - self.before

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.seconds.append(time.process_time() - self.start)
            self.backwards.append(self.backward)


def watched(arguments: argparse.Namespace, case: Case) -> Alternating:
    """A fit of one collection: updates without the callback and with it in turn, first and last without."""
    watch = Alternating()
    data = RolloutDataModule(
        Corridor(arguments.words),
        Scribe(),
        tasks_per_collection=arguments.rows // 4,
        group_size=4,
        max_turns=TURNS,
        max_tokens=arguments.tokens,
        passes=2 * arguments.rounds + 3,
        micro_batches=case.micro_batches,
    )
    objective = PolicyGradient(
        ratio="token",
        old="engine" if case.clipped else "recompute",
        kl_coefficient=0.1 if case.regularized else 0.0,
        entropy_coefficient=0.01 if case.regularized else 0.0,
    )
    source = Model(
        tokenizer="sorl:textworld",
        recompute=case.recompute,
        hidden_size=arguments.width,
        num_hidden_layers=arguments.layers,
    )
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        accumulate_grad_batches=case.micro_batches,
        callbacks=[watch],
        **dict.fromkeys(quiet, False),
    )
    module = AgentModule(source, objective, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    trainer.fit(module, datamodule=data)
    assert all((share > 0) == case.clipped for share in watch.clipped), "not the case that it is called"
    return watch


def figures_of(watch: Alternating, case: Case) -> dict[str, Any]:
    """Seconds of an update without and with the callback, their ratio and its limit."""
    without, acting = watch.seconds[2::2], watch.seconds[3::2]  # the first two warm up
    ratios = [2 * time / (before + after) for time, before, after in zip(acting, without, without[1:], strict=False)]
    backward = statistics.median(watch.backwards[2::2]) / statistics.median(without)
    return {
        "without": statistics.median(without),
        "with": statistics.median(acting),
        "ratio": statistics.median(ratios),
        "limit": case.limit + case.backwards * backward,
        "backward": backward,
        "clipped": watch.clipped[-1],
        "seconds": watch.seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="where to write the figures, as JSON")
    parser.add_argument("--rows", type=int, default=16, help="trajectories, a multiple of 4")
    parser.add_argument("--words", type=int, default=16, help="of an observation")
    parser.add_argument("--tokens", type=int, default=8, help="of a turn")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=25, help="updates with the callback")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    results = {name: figures_of(watched(arguments, case), case) for name, case in CASES.items()}
    columns = ("without", "with", "ratio", "limit", "backward", "clipped")
    print(f"{'':34}" + "".join(f"{column:>10}" for column in columns))
    for name, figures in results.items():
        print(f"{name:34}" + "".join(f"{figures[column]:10.3f}" for column in columns))
    if arguments.output:
        settings = {key: value for key, value in vars(arguments).items() if key != "output"}
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        report = {"settings": settings, "versions": versions, "cases": results}
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
