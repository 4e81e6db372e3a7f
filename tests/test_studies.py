"""The study's page says what its files say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from studies.stability.cells import CELLS
from studies.stability.page import write_page
from studies.stability.run import FULL, command


def record(cell: str, seed: int, success: list[float]) -> dict:
    curves = {name: [0.1] * len(success) for name in ("clip_fraction", "grad_norm", "bias_norm")}
    return {"cell": cell, "seed": seed, "cpu_seconds": 60.0, "curves": {"success": success, **curves}}


@pytest.mark.filterwarnings("ignore")  # matplotlib's own
def test_the_page_counts_collapses_and_says_how_many_seeds_it_has(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for seed, success in enumerate([[0.5] * 8 + [0.1, 0.0], [0.5] * 10]):
        (tmp_path / f"GRPO-{seed}.json").write_text(json.dumps(record("GRPO", seed, success)))
    write_page(tmp_path, tmp_path / "docs/stability.md")
    page = (tmp_path / "docs/stability.md").read_text()
    assert "| GRPO | 2 | 1 of 2 | 0.28 ± 0.32 | 0.50 ± 0.00 | 0.100 | 0.10 | 60 |" in page
    assert "| SO-PPO | 0 |" in page
    assert "The study is unfinished: 2 runs, and a cell with 0 seeds." in page
    assert (tmp_path / "docs/stability/curves.png").exists()


def test_every_cell_is_a_command_that_parses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from lightning.pytorch.cli import LightningCLI

    from sorl_lightning import cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LightningCLI, "_run_subcommand", lambda self, subcommand: None)
    monkeypatch.setattr(cli, "prepare", lambda *_: None)
    for cell in CELLS:
        run = cli.run(command(cell, 1, FULL, tmp_path))
        names = {type(callback).__name__ for callback in run.trainer.callbacks}
        assert ("ClippingTriggeredNormalization" in names) == cell.normalized
        assert (run.datamodule.mini_batches, run.datamodule.passes, run.datamodule.seed) == (4, 4, 1)
        assert len(run.datamodule.environment.parameters) == 4  # the coin game, with eight tasks
        assert run.datamodule.environment.train_tasks == 8
