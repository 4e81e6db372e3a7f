"""The recipe for several processes: torchrun starts them, and they train what one would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

pytestmark = pytest.mark.distributed
SOURCE = "sorl_lightning.models"


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A run of seconds whose warm start is missing."""
    rows = [{"prompt": f"say {word}", "answer": word} for word in ("yes", "no", "take", "open")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = {"class_path": f"{SOURCE}.SmallLlama",
             "init_args": {"tokenizer": "sorl:textworld", "hidden_size": 32, "num_hidden_layers": 1}}  # fmt: skip
    first = {
        "trainer": {"max_epochs": 1, "accelerator": "cpu", "devices": 1, "limit_val_batches": 0, "logger": False},
        "model": {"policy": small, "objective": {"class_path": "sorl_lightning.objectives.PolicyGradient"}},
        "data": {"environment": {"class_path": "sorl_lightning.rollout.environments.ToolUse",
                                 "init_args": {"train": str(tmp_path / "rows.jsonl")}},
                 "tasks_per_collection": 4, "group_size": 4, "max_turns": 1, "max_tokens": 4,
                 "reward": "doubles.odd_first_token"},
    }  # fmt: skip
    (tmp_path / "first.yaml").write_text(yaml.safe_dump({**first, "hf_export": {"folder": "made/policy"}}))
    second = {**first, "model": {**first["model"], "policy": "made/policy"}}
    second["trainer"] = {**first["trainer"], "max_epochs": 2}
    second["warm_start"] = {"config": str(tmp_path / "first.yaml"), "folder": "made/policy"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(second))
    return str(tmp_path / "run.yaml")


def last(folder: Path, config: str, launcher: list[str], extra: list[str]) -> tuple[str, dict[str, torch.Tensor]]:
    """What a run says, and its last weights."""
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))}
    command = [*launcher, "-m", "sorl_lightning", "fit", "--config", config, "--checkpoint.dirpath", "saved", *extra]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, torch.load(folder / "saved/last.ckpt", weights_only=False)["state_dict"]


def test_two_processes_of_torchrun_train_what_one_does(config: str, tmp_path: Path) -> None:
    _, alone = last(tmp_path / "one", config, [sys.executable], [])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    text, together = last(tmp_path / "two", config, torchrun, ["--trainer.devices", "2"])
    assert text.count("is not there yet: training it") == 1  # by one rank, and all have waited
    assert alone.keys() == together.keys()
    for name, weight in alone.items():
        torch.testing.assert_close(together[name], weight, rtol=0, atol=1e-6, msg=name)
