"""The study's world, and what the two models that meet in it can do."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import lightning as L

from sorl_lightning.datamodule import Evaluation, RolloutDataModule
from sorl_lightning.module import AgentModule
from sorl_lightning.objectives import Imitation
from sorl_lightning.rollout.engines import LocalEngine
from sorl_lightning.rollout.environments import TextWorldExpress
from sorl_lightning.types import Message, Task
from sorl_lightning.warm_start import prepare

# Made by the config of the teacher, which starts from the student, where it is missing.
MODELS = {"teacher": Path("runs/coin_teacher/policy"), "student": Path("runs/coin_student/policy")}
MAX_TURNS = 16
LIMITS: dict[str, Any] = {"max_turns": MAX_TURNS, "max_tokens": 8, "group_size": 1}
QUIET: dict[str, Any] = {
    "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False, "enable_checkpointing": False,
    "enable_model_summary": False, "num_sanity_val_steps": 0,
}  # fmt: skip
RANDOM_ACTIONS = (0, 3)


class Coin(TextWorldExpress):
    """Find the coin in four rooms, as in the configs.

    Args:
        random_actions: actions played at random before the policy's first, never the one that wins.
        tasks: of each held-out split.
    """

    def __init__(self, random_actions: int = 0, tasks: int = 64) -> None:
        super().__init__(
            game="coin", min_gold=4, max_gold=10, train_tasks=500, validation_tasks=tasks, test_tasks=2 * tasks,
            parameters={"numLocations": 4, "numDistractorItems": 0, "includeDoors": 0, "limitInventorySize": 0},
            show_admissible=True,
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


def measure(folder: Path, random_actions: int, tasks: int) -> float:
    """Success on the test split, sampled at temperature 1, after so many random actions."""
    engine = LocalEngine()
    data = RolloutDataModule(Coin(random_actions, tasks), engine, validation=Evaluation(engine=engine), **LIMITS)
    figures = L.Trainer(**QUIET).test(AgentModule(str(folder), Imitation()), datamodule=data, verbose=False)[0]
    return float(figures["test/success"])


def prepare_models(results: Path, tasks: int) -> None:
    """Train teacher and student where they are missing, and write down what each reaches."""
    if not MODELS["teacher"].exists():
        prepare("sorl:coin_teacher", str(MODELS["teacher"]))
    path = results / "models.json"
    if path.exists():
        return
    report = {
        name: {str(count): measure(folder, count, tasks) for count in RANDOM_ACTIONS} for name, folder in MODELS.items()
    }
    print(report, flush=True)
    path.write_text(json.dumps({"tasks": 2 * tasks, "success": report}, indent=1) + "\n")
