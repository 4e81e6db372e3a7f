"""The demonstration, whole but short."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sorl_lightning.cli import main


@pytest.mark.slow
def test_the_demo_compares_five_policies_on_held_out_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["demo", "--collections", "10", "--learning_rate", "0"])
    figures = json.loads(Path("runs/demo/demo.json").read_text())
    chance, warm_start, trained, _, expert = (row["success"] for row in figures["rows"])
    assert expert == 1.0
    assert chance < 0.6
    assert trained == warm_start  # the learning rate is 0, and seeds of held-out tasks never change
    assert all(row["episodes"] == 400 for row in figures["rows"])
    assert [step for step, _ in figures["curves"]["rollout/success"]] == list(range(10))
    assert [step for step, _ in figures["curves"]["val/success"]] == [9]
    assert "tensorboard --logdir" in capsys.readouterr().out
