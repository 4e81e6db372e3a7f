"""The demonstration, whole but short."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from pathlib import Path

import pytest
from jsonargparse import ArgumentParser

from sorl_lightning.cli import main
from sorl_lightning.commands.demo import NEXT, Row, show


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


def test_the_commands_at_the_end_parse_and_are_on_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    show([Row("nobody", 0.5, 1.0, 2.0, 4)], 60.0, "runs/a", Path("runs/a/version_0"))
    lines = capsys.readouterr().out.splitlines()[-len(NEXT) :]
    words = [shlex.split(re.sub(r"^  .{12}", "", line)) for line in lines]
    assert [Path(line[0]).name for line in words] == ["tensorboard", "sorl", "sorl", "sorl"]
    assert words[0][1:] == ["--logdir", "runs/a"]
    for line in words[1:]:
        command = importlib.import_module(f"sorl_lightning.commands.{line[1]}")
        parser = ArgumentParser(exit_on_error=False)
        parser.add_function_arguments(getattr(command, line[1]), as_positional=True)
        assert parser.parse_args(getattr(command, "words", list)(line[2:]))
