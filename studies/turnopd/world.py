"""The study's world, and the two models that meet in it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch

from sorl_lightning.datamodule import Evaluation, RolloutDataModule
from sorl_lightning.models import SmallLlama
from sorl_lightning.module import AgentModule
from sorl_lightning.objectives import Imitation
from sorl_lightning.rollout.engines import ExpertEngine, LocalEngine
from sorl_lightning.rollout.environments import TextWorldExpress
from sorl_lightning.types import Message, Task
from studies.turnopd.imitation import ImitationOfExpertTurns

MAX_TURNS = 16
POLICY = {"tokenizer": "sorl:textworld", "hidden_size": 64, "num_hidden_layers": 2}
LIMITS: dict[str, Any] = {"max_turns": MAX_TURNS, "max_tokens": 8, "group_size": 1}
QUIET: dict[str, Any] = {
    "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False, "enable_checkpointing": False,
    "enable_model_summary": False, "num_sanity_val_steps": 0, "gradient_clip_val": 1.0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model is imitated from the expert: collections of 256 tasks, 16 updates each.

    Attributes:
        epochs: collections.
        mistakes: probability that the demonstrator's turn is a random action.
        imitate_mistakes: whether those turns are imitated as well.
    """

    epochs: int
    mistakes: float
    imitate_mistakes: bool


TEACHER = Recipe(epochs=36, mistakes=0.35, imitate_mistakes=False)
STUDENT = Recipe(epochs=3, mistakes=0.8, imitate_mistakes=True)


class Coin(TextWorldExpress):
    """Find the coin in four rooms.

    Args:
        random_actions: actions played at random before the policy's first, never the one that wins.
        tasks: of each held-out split.
    """

    def __init__(self, random_actions: int = 0, tasks: int = 64) -> None:
        super().__init__(
            game="coin", min_gold=4, max_gold=10, train_tasks=400, validation_tasks=tasks, test_tasks=2 * tasks,
            parameters={"numLocations": 4, "numDistractorItems": 0, "includeDoors": 0, "limitInventorySize": 0},
        )  # fmt: skip
        self.random_actions = random_actions

    def reset(self, task: Task) -> list[Message]:
        messages = super().reset(task)
        chance, seen = random.Random(task.id), ""
        for _ in range(self.random_actions):
            actions = [action for action in self.admissible_actions() if action != "take coin"]
            seen = self.step(chance.choice(actions)).observation
        if not seen:
            return messages
        description = messages[0]["content"].split("\n\n")[0]
        return [Message(role="user", content=f"{description}\n\n{seen}")]


def imitate(recipe: Recipe, folder: Path, epochs: int | None = None) -> None:
    """Train a model by ``recipe``, or for fewer ``epochs``, into a Hugging Face folder; nothing where it exists."""
    if folder.exists():
        return
    objective = Imitation() if recipe.imitate_mistakes else ImitationOfExpertTurns()
    module = AgentModule(SmallLlama(**POLICY), objective, lambda parameters: torch.optim.AdamW(parameters, lr=3e-3))
    engine = ExpertEngine(mistakes=recipe.mistakes)
    data = RolloutDataModule(Coin(), engine, tasks_per_collection=256, mini_batches=16, **LIMITS)
    trainer = L.Trainer(max_epochs=epochs or recipe.epochs, limit_val_batches=0, **QUIET)
    trainer.fit(module, datamodule=data)
    module.policy_model.save_pretrained(folder)
    module.tokenizer.save_pretrained(folder)


def measure(folder: Path, random_actions: Sequence[int], tasks: int) -> dict[str, float]:
    """Sampled success on the test split, at temperature 1, after each number of random actions."""
    found = {}
    for count in random_actions:
        engine = LocalEngine()
        module = AgentModule(str(folder), Imitation())
        data = RolloutDataModule(Coin(count, tasks), engine, validation=Evaluation(engine=engine), **LIMITS)
        figures = L.Trainer(**{**QUIET, "gradient_clip_val": None}).test(module, datamodule=data, verbose=False)[0]
        found[str(count)] = float(figures["test/success"])
    return found


def prepare(results: Path, models: Path, epochs: int | None, tasks: int) -> dict[str, Any]:
    """Teacher and student, trained once, and what each reaches; kept in ``models.json``."""
    path = results / "models.json"
    if path.exists() and models.exists():
        return json.loads(path.read_text())
    report: dict[str, Any] = {}
    for name, recipe in (("teacher", TEACHER), ("student", STUDENT)):
        imitate(recipe, models / name, epochs)
        success = measure(models / name, (0, 3), tasks)
        report[name] = {"recipe": vars(recipe) | ({"epochs": epochs} if epochs else {}), "success": success}
        print(name, success, flush=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    return report
