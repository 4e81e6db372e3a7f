"""Figures and trajectories reach the loggers of others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lightning.pytorch.loggers import MLFlowLogger, WandbLogger

from conftest import agent
from doubles import Countdown, ScriptedEngine
from sorl_lightning.callbacks import TrajectoryLog
from sorl_lightning.datamodule import RolloutDataModule


def rollouts() -> RolloutDataModule:
    limits = {"max_turns": 3, "max_tokens": 4, "context_limit": 128}
    return RolloutDataModule(Countdown([2]), ScriptedEngine(), tasks_per_collection=1, group_size=2, **limits)


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)  # mlflow's own
def test_mlflow_has_figures_and_trajectories(fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the one store that needs no data base
    logger = MLFlowLogger("sorl", tracking_uri=f"file:{tmp_path}")
    fit(agent(), rollouts(), callbacks=[TrajectoryLog(1)], logger=logger, max_epochs=2, log_every_n_steps=1)
    run = logger.experiment.get_run(logger.run_id)
    assert "train/loss" in run.data.metrics
    texts = sorted(path.name for path in tmp_path.rglob("trajectories/*.md"))
    assert texts == ["000000.md", "000001.md"]
    assert "**train-0** reward" in next(tmp_path.rglob("000000.md")).read_text()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")  # wandb's own
def test_wandb_has_figures_and_trajectories(fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(save_dir=tmp_path, offline=True, project="sorl")
    fit(agent(), rollouts(), callbacks=[TrajectoryLog(1)], logger=logger, max_epochs=2, log_every_n_steps=1)
    assert "train/loss" in logger.experiment.summary.keys()  # noqa: SIM118  its summary is no mapping
    wandb.finish()
    (table,) = [json.loads(path.read_text()) for path in tmp_path.rglob("*.table.json") if "0" in path.name][:1]
    assert table["columns"] == ["collection", "trajectories"]
    assert "**train-0** reward" in table["data"][0][1]
