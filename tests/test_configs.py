"""Every config and switch that ships parses, composes, and keeps to the house rules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI

from sorl_lightning import cli

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
ENGINES = sorted((ROOT / "configs/engine").glob("*.yaml"))
TEACHERS = sorted((ROOT / "configs/teacher").glob("*.yaml"))
OBJECTIVES = sorted((ROOT / "configs/objective").glob("*.yaml"))
SWITCHES = sorted((ROOT / "callbacks").glob("*.yaml"))


def name(path: Path) -> str:
    return path.stem


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Parse and instantiate, without running."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LightningCLI, "_run_subcommand", lambda self, subcommand: None)
    return lambda *paths: cli.run(["fit", *(part for path in paths for part in ("--config", str(path)))])


@pytest.mark.parametrize("path", CONFIGS, ids=name)
def test_every_config_instantiates(parse, path: Path) -> None:
    assert parse(path).datamodule.environment.tasks is not None


@pytest.mark.parametrize("path", ENGINES, ids=name)
def test_every_engine_composes_with_the_quickstart(parse, path: Path) -> None:
    command = parse(ROOT / "configs/quickstart.yaml", path)
    assert command.datamodule.engine is not None
    assert command.datamodule.tasks_per_collection == 16
    assert "callbacks" not in yaml.safe_load(path.read_text())["trainer"]


@pytest.mark.parametrize("path", TEACHERS, ids=name)
def test_every_teacher_composes_with_a_distillation(parse, path: Path) -> None:
    run = parse(ROOT / "configs/coin_opd_topk.yaml", path)
    assert type(run.model.teacher).__name__ == "ServedTeacher"
    assert run.model.objective.recorded_top_k == 50


@pytest.mark.parametrize("path", OBJECTIVES, ids=name)
def test_every_objective_goes_on_top_of_the_quickstart(parse, path: Path) -> None:
    config = yaml.safe_load(path.read_text())
    run = parse(ROOT / "configs/quickstart.yaml", path)
    for setting, value in config["model"]["objective"]["init_args"].items():
        assert getattr(run.model.objective, setting) == value
    for setting, value in config.get("data", {}).items():
        assert getattr(run.datamodule, setting) == value
    assert (run.model.critic is not None) == run.model.objective.needs_critic
    assert run.datamodule.max_turns == 6  # the quickstart's own


@pytest.mark.parametrize("path", [*CONFIGS, *OBJECTIVES], ids=name)
def test_no_config_replaces_the_callbacks(path: Path) -> None:
    assert "callbacks" not in yaml.safe_load(path.read_text()).get("trainer", {})


@pytest.mark.parametrize("switch", SWITCHES, ids=name)
def test_every_switch_adds_exactly_its_callback(parse, switch: Path) -> None:
    (addition,) = yaml.safe_load(switch.read_text())["trainer"].values()
    class_name = addition["class_path"].rpartition(".")[2]
    assert "".join(part.capitalize() for part in switch.stem.split("_")).lower() == class_name.lower()
    config = ROOT / "configs/quickstart.yaml"
    without = [type(callback).__name__ for callback in parse(config).trainer.callbacks]
    with_it = [type(callback).__name__ for callback in parse(config, switch).trainer.callbacks]
    assert sorted(with_it) == sorted([*without, class_name])


def test_the_warm_start_lands_where_the_quickstart_looks(parse) -> None:
    quickstart, imitation = (
        yaml.safe_load((ROOT / f"configs/{n}.yaml").read_text()) for n in ("quickstart", "quickstart_imitation")
    )
    assert quickstart["warm_start"] == {
        "config": "sorl:quickstart_imitation",
        "folder": imitation["hf_export"]["folder"],
    }
    assert quickstart["model"]["policy"]["init_args"]["path"] == imitation["hf_export"]["folder"]
    worlds = [config["data"]["environment"]["init_args"] for config in (quickstart, imitation)]
    for key in ("game", "parameters", "split_by", "show_admissible"):
        assert worlds[0].get(key) == worlds[1].get(key)


def world(config: dict) -> tuple:
    """What must be the same where a model is made and where it is used."""
    environment = config["data"]["environment"]
    settings = environment.get("init_args", {})
    return (
        environment["class_path"],
        *(settings.get(key) for key in ("game", "parameters", "split_by", "action_tags")),
    )


RUNS = {path.stem: yaml.safe_load(path.read_text()) for path in CONFIGS}
MADE = {run["hf_export"]["folder"]: run for run in RUNS.values() if "hf_export" in run}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_models_come_from_runs_in_the_same_world(run: dict) -> None:
    used = set(re.findall(r"runs/[\w/]+", yaml.safe_dump({key: run.get(key) for key in ("model", "warm_start")})))
    for folder in used:
        assert folder in MADE
        assert world(MADE[folder]) == world(run)
    if (start := run.get("warm_start")) is not None:
        assert RUNS[start["config"].removeprefix("sorl:")]["hf_export"]["folder"] == start["folder"]


@pytest.mark.parametrize("path", [path for path in CONFIGS if "opd" in path.stem], ids=name)
def test_every_switch_composes_with_every_distillation(parse, path: Path) -> None:
    for switch in SWITCHES:
        assert parse(path, switch).trainer.callbacks, switch
    one_of_each_knob = [
        ROOT / f"callbacks/{stem}.yaml"
        for stem in ("rollout_depth_controller", "kl_schedule_transition", "guided_opd", "tcod_b2f", "sage_opd",
                     "atod_annealing", "turn_diagnosis", "clipping_triggered_normalization")
    ]  # fmt: skip
    names = {type(callback).__name__ for callback in parse(path, *one_of_each_knob).trainer.callbacks}
    assert {"RolloutDepthController", "KLScheduleTransition", "GuidedOPD", "TCODB2F", "SAGEOPD"} <= names
