"""Where a student's held-out divergence lies: in well-formed turns, or in those without an action.

    python docs/results/search/by_validity.py runs/search_imitation/policy runs/search_teacher/policy OUTPUT

Plays what ``sorl validate --config sorl:search_opd --data.validation.max_tasks 40`` plays, and writes sums of the
reverse KL.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lightning as L
import torch

from sorl_lightning.datamodule import Evaluation, RolloutDataModule
from sorl_lightning.models import Pretrained
from sorl_lightning.module import AgentModule
from sorl_lightning.objectives import Distillation
from sorl_lightning.rollout.actions import MalformedAction, tagged_action
from sorl_lightning.rollout.collector import Collection
from sorl_lightning.rollout.environments import MultiHopSearch
from sorl_lightning.rollout.packing import pack
from sorl_lightning.student_teacher import forward, parts
from sorl_lightning.teachers import LocalTeacher


class Kept(RolloutDataModule):
    """Keeps the held-out rollouts."""

    def evaluate(self, split: str) -> Collection:
        self.played = super().evaluate(split)
        return self.played


def well_formed(text: str) -> bool:
    try:
        return bool(tagged_action(text, ("search", "answer")))
    except MalformedAction:
        return False


def main(student: str, teacher: str, output: str) -> None:
    module = AgentModule(Pretrained(path=student), Distillation(), teacher=LocalTeacher(teacher))
    world = MultiHopSearch(hops=[2], topk=1, passage_words=24)
    data = Kept(world, group_size=1, max_turns=4, max_tokens=48, context_limit=640, validation=Evaluation(max_tasks=40))
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    (figures,) = trainer.validate(module, datamodule=data, verbose=False)
    trajectories = data.played.sound
    rows, sums = pack(trajectories), {}
    with torch.no_grad():
        for _, part in parts(rows, torch.device("cpu")):
            compared = forward(module.policy, module.objective, module.teacher, part, 1.0)[3].comparison
            for row in range(len(part.turn)):
                for turn in trajectories[int(part.trajectory[row, 0])].turns:
                    here = part.turn[row] == turn.index
                    kind = sums.setdefault("well-formed" if well_formed(turn.text) else "malformed", [0, 0, 0.0])
                    kind[0] += 1
                    kind[1] += int(here.sum())
                    kind[2] += float(compared.divergence[row][here].sum())
    rows = {name: dict(zip(("turns", "tokens", "reverse_kl_sum"), kind, strict=True)) for name, kind in sums.items()}
    held_out = {name: figures[f"val/{name}"] for name in ("divergence", "tokens", "success")}
    Path(output).write_text(json.dumps({"student": student, **held_out, "turns": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
