"""The stability study's pure parts, its commands, and that its page says what its files say."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from studies.stability import run as runs
from studies.stability.__main__ import planned, scouting
from studies.stability.cells import CELLS
from studies.stability.figures import Figures, last_fifth, load, pools, spread
from studies.stability.page import counted, write_page
from studies.stability.regimes import COIN, REGIMES, SIMONSAYS, Setting
from studies.stability.run import ROOT, Run, execute, means

GRPO = CELLS[0]


def record(cell: str, seed: int, success: list[float], **others: list[float]) -> dict[str, Any]:
    names = ("clip_fraction", "clip_fraction_turns", "grad_norm", "bias_norm", "constant_groups", "entropy")
    curves = {name: [0.1] * len(success) for name in names} | {"success": success, **others}
    return {"cell": cell, "seed": seed, "updates": 16, "cpu_seconds": 60.0, "curves": curves}


def write(folder: Path, found: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{found['cell']}-{found['seed']}.json").write_text(json.dumps(found))


def test_the_last_fifth_is_that_of_the_definition_of_a_collapse() -> None:
    assert last_fifth([1, 2, 3]) == [3]
    assert last_fifth([1, 2, 3, 4, 5, 6]) == [5, 6]  # rounded up, as in has_collapsed
    assert last_fifth(list(range(12))) == [9, 10, 11]


def test_figures_of_a_cell() -> None:
    found = Figures(
        [
            record("PPO", 0, [0.5] * 8 + [0.1, 0.0], explained_variance=[0.0] * 8 + [0.2, 0.4]),
            record("PPO", 1, [0.25] * 9 + [0.37], clip_fraction=[0.3] * 10, bias_norm=[0.0, 7.0] + [1.0] * 8),
        ]
    )
    assert (found.collapsed, found.final, found.each, found.best) == (
        "1 of 2",
        "0.18 ± 0.18",
        "0.05, 0.31",
        "0.43 ± 0.09",
    )
    assert (found.start, found.clipped_tokens, found.dead) == ("0.38 ± 0.18", "0.20 ± 0.14", "0.10 ± 0.00")
    assert (found.bias, found.explained, found.cpu) == ("3.55", "0.30", "60")
    assert (Figures([]).collapsed, Figures([]).final, Figures([]).cpu) == ("0 of 0", "-", "-")
    assert (spread([]), spread([0.123]), spread([1.0, 3.0], 1)) == ("-", "0.12", "2.0 ± 1.4")


def test_pools_take_the_cells_of_one_ratio_or_one_switch_together() -> None:
    results = {cell.name: [record(cell.name, 0, [0.5, 0.0 if "Turn" in cell.name else 0.5])] for cell in CELLS}
    pooled = {name: found.collapsed for name, found in pools(results).items()}
    assert pooled == {
        "with the token ratio": "0 of 4", "with the turn ratio": "2 of 4",
        "without the normalization": "2 of 4", "with it": "0 of 4",
        "GRPO, token": "0 of 2", "GRPO, turn": "1 of 2", "PPO, token": "0 of 2", "PPO, turn": "1 of 2",
    }  # fmt: skip


def test_updates_are_averaged_over_their_collection() -> None:
    assert means([1.0, 3.0, 10.0, 20.0], 2) == [2.0, 15.0]
    assert means([0.1234567], 1) == [0.1235]


def test_an_unfinished_study_has_all_cells_and_regimes() -> None:
    plan = planned(3, quick=False)
    assert len(plan) == len({str(run) for run in plan}) == 3 * len(CELLS) * len(REGIMES)
    first = plan[: len(REGIMES) * (len(CELLS) - 1)]
    assert {(run.regime, run.cell) for run in first} == set(product(REGIMES, (c for c in CELLS if not c.one_pass)))
    assert {run.seed for run in first} == {0}
    assert all(run.setting == run.regime.setting for run in plan)


def test_the_scouting_has_every_setting_for_the_same_two_cells_beside_the_results() -> None:
    names = [str(run) for run in scouting("simonsays")]
    assert len(set(names)) == 2 * len(SIMONSAYS.grid) == 8
    assert "simonsays/scouting/SO-GRPO-lr0.003-clip0.4-0" in names
    assert all(run.collections == SIMONSAYS.scouted_collections for run in scouting("simonsays"))
    assert SIMONSAYS.setting in SIMONSAYS.grid


def test_the_control_of_one_pass_has_as_many_updates() -> None:
    (cell,) = (cell for cell in CELLS if cell.one_pass)
    control, other = (Run(cell=each, regime=COIN, setting=COIN.setting, seed=0) for each in (cell, GRPO))
    assert control.collections == COIN.passes * other.collections
    assert control.collections * cell.updates(COIN) == other.collections * GRPO.updates(COIN)


def test_a_result_that_is_there_is_not_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = Run(cell=GRPO, regime=COIN, setting=COIN.setting, seed=2)
    monkeypatch.setattr(runs.sys, "executable", "false")
    with pytest.raises(RuntimeError, match="coin/GRPO-2 ended with"):
        execute(run, tmp_path / "work", tmp_path)
    assert not (tmp_path / "coin").exists()
    write(tmp_path / "coin", record("GRPO", 2, [0.5]))
    before = (tmp_path / "coin/GRPO-2.json").read_text()
    assert not execute(run, tmp_path / "work", tmp_path)
    assert (tmp_path / "coin/GRPO-2.json").read_text() == before


@pytest.mark.filterwarnings("ignore")  # matplotlib's own
def test_the_page_counts_collapses_and_puts_figures_into_its_discussion(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for seed, success in enumerate([[0.5] * 8 + [0.1, 0.0], [0.5] * 10]):
        write(tmp_path / "coin", record("GRPO", seed, success))
    (tmp_path / "reading.md").write_text("Token ratio: {coin[GRPO].collapsed}; turn ratio: {coin[SO-GRPO].final}.")
    write_page(tmp_path, tmp_path / "docs/stability.md")
    page = (tmp_path / "docs/stability.md").read_text()
    flat = "0.10 ± 0.00"
    outcome = ["GRPO", "2", "1 of 2", "0.28 ± 0.32", "0.05, 0.50", "0.50 ± 0.00"]
    cells = [*outcome, flat, flat, flat, "0.10", "-", flat, "-", "60"]
    assert f"| {' | '.join(cells)} |" in page
    assert "| SO-PPO | 0 | 0 of 0 |" in page
    assert "Collapsed: 1 of 2 with the token ratio and 0 of 0 with the turn ratio;" in page
    assert "The cells have 0 to 2 seeds. With fewer than 3 seeds no two single cells can be told apart." in page
    assert "Token ratio: 1 of 2; turn ratio: -." in page
    assert (tmp_path / "docs/stability/simonsays.png").exists()


def test_a_regime_in_which_nothing_collapses_says_so(tmp_path: Path) -> None:
    for cell in CELLS:
        for seed in range(3):
            write(tmp_path, record(cell.name, seed, [0.5] * 5))
    sentences = counted(load(tmp_path))
    assert "Nothing collapsed" in sentences
    assert "seeds" not in sentences


def test_every_cell_is_a_command_that_parses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from lightning.pytorch.cli import LightningCLI

    from sorl_lightning import cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LightningCLI, "_run_subcommand", lambda self, subcommand: None)
    setting = Setting(learning_rate=3e-3, clip_range=0.3)
    for regime, cell in [*product([COIN], CELLS), (SIMONSAYS, GRPO)]:
        made = cli.run(Run(cell=cell, regime=regime, setting=setting, seed=1).command(tmp_path))
        names = {type(callback).__name__ for callback in made.trainer.callbacks}
        assert ("ClippingTriggeredNormalization" in names) == cell.normalized
        assert ("ClippingMonitor" in names) != cell.normalized
        data, objective = made.datamodule, made.model.objective
        assert (data.mini_batches, data.passes, data.seed) == (4, 1 if cell.one_pass else 4, 1)
        assert (data.environment.game, data.tasks_per_collection) == (regime.name, 8)
        assert (data.environment.train_tasks == 8) == (regime is COIN)
        ranges = (objective.epsilon_low, objective.epsilon_high)
        assert ranges == ((3e-4, 4e-4) if cell.own_clip_range else (0.3, 0.3))
        (group,) = made.model.optimizer([torch.nn.Parameter(torch.zeros(1))]).param_groups
        assert (group["lr"], group["weight_decay"]) == (pytest.approx(3e-3 * cell.step), 0.0)


@pytest.mark.filterwarnings("ignore")  # matplotlib's own
def test_the_page_is_what_the_results_make_of_it(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_page(ROOT / "studies/results/stability", tmp_path / "stability.md")
    assert (tmp_path / "stability.md").read_text() == (ROOT / "docs/results/stability.md").read_text()
