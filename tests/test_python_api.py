"""The page docs/python_api.md: short, and the same run as its config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sorl_lightning.cli import main
from test_docs import ROOT, blocks, commands

PAGE = ROOT / "docs/python_api.md"


@pytest.fixture
def namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the page's first block leaves behind, run in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(blocks(PAGE, "python")[0], str(PAGE), "exec"), names)
    return names


def test_a_run_takes_at_most_20_lines() -> None:
    assert len([line for line in blocks(PAGE, "python")[0].splitlines() if line]) <= 20


def test_python_and_the_command_train_the_same_weights(namespace: dict[str, Any]) -> None:
    module = namespace["module"]
    assert module.policy_version == 4
    trained = module.policy_model.state_dict()
    untrained = namespace["policy"].load()[0].state_dict()
    assert any(not torch.equal(trained[name], untrained[name]) for name in trained)

    Path("api.yaml").write_text(blocks(PAGE, "yaml")[0])
    (arguments,) = commands(PAGE)
    main([*arguments, "--trainer.enable_progress_bar", "false", "--trainer.default_root_dir", "command"])
    (checkpoint,) = Path("command").rglob("last.ckpt")
    saved = torch.load(checkpoint, weights_only=False)["state_dict"]
    assert all(torch.equal(trained[name], saved[f"policy.model.{name}"]) for name in trained)
