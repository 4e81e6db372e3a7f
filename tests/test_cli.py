"""The command: what a user types, and what a user is told."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import sorl_lightning
from sorl_lightning.agent_cli import check_policy
from sorl_lightning.cli import main
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.shipped import shipped_files
from sorl_lightning.warm_start import WarmStart

ROOT = Path(__file__).parents[1]
SWITCH = str(ROOT / "callbacks/clipping_triggered_normalization.yaml")


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of a run of seconds on the quickstart's world, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    config = {
        "trainer": {"max_epochs": 2, "accelerator": "cpu", "devices": 1, "limit_val_batches": 0,
                    "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": "runs"},
        "model": {
            "policy": {"class_path": "sorl_lightning.models.SmallLlama",
                       "init_args": {"tokenizer": "sorl:textworld", "hidden_size": 32, "num_hidden_layers": 1}},
            "objective": {"class_path": "sorl_lightning.objectives.PolicyGradient"},
        },
        "data": {
            "environment": {"class_path": "sorl_lightning.rollout.environments.TextWorldExpress",
                            "init_args": {"game": "coin", "train_tasks": 4, "validation_tasks": 2, "test_tasks": 2}},
            "tasks_per_collection": 2, "group_size": 2, "max_turns": 2, "max_tokens": 4, "micro_batches": 2,
        },
    }  # fmt: skip
    Path("small.yaml").write_text(yaml.safe_dump(config))
    return ["fit", "--config", "small.yaml"]


def sentence(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the user reads when ``arguments`` are refused."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code not in (0, None)
    return str(stop.value.code) + capsys.readouterr().err


def test_fit_with_a_switch_saves_a_config_that_replays(small: list[str]) -> None:
    main([*small, "--config", SWITCH])
    (saved,) = Path("runs").rglob("config.yaml")
    config = yaml.safe_load(saved.read_text())
    names = [callback["class_path"].split(".")[-1] for callback in config["trainer"]["callbacks"]]
    assert names == ["ClippingTriggeredNormalization"]
    main(["fit", "--config", str(saved)])
    checkpoints = [sorted(Path("runs").rglob(f"version_{version}/checkpoints/last.ckpt")) for version in (0, 1)]
    import torch

    first, second = (torch.load(paths[0], weights_only=False)["state_dict"] for paths in checkpoints)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_accumulation_and_temperature_follow_the_data(small: list[str]) -> None:
    main([*small, "--data.temperature", "0.7"])
    (saved,) = Path("runs").rglob("config.yaml")
    config = yaml.safe_load(saved.read_text())
    assert config["data"]["micro_batches"] == 2
    assert config["data"]["temperature"] == 0.7


@pytest.mark.parametrize(
    ("target", "value", "source", "other"),
    [
        ("model.temperature", 0.5, "data.temperature", 1.0),
        ("trainer.accumulate_grad_batches", 3, "data.micro_batches", 2),
    ],
)
@pytest.mark.parametrize("place", ["config", "section", "named section", "command line"])
def test_a_linked_setting_is_never_silently_overridden(small, target, value, source, other, place, capsys) -> None:
    section, name = target.split(".")
    part = {name: value}
    Path("part.yaml").write_text(yaml.safe_dump(part))
    Path("more.yaml").write_text(yaml.safe_dump({section: part if place == "config" else "part.yaml"}))
    extra = {
        "config": ["--config", "more.yaml"],
        "section": [f"--{section}", "part.yaml"],
        "named section": ["--config", "more.yaml"],
        "command line": [f"--{target}", str(value)],
    }[place]
    text = sentence([*small, *extra], capsys)
    assert target in text
    assert source in text
    if place != "command line":
        assert f"{target}={value} (in " in text
        assert f"must equal {source}={other}" in text
        main([*small, *extra, f"--{source}", str(value)])  # as it says


def test_switches_append_and_nested_settings_merge_and_stay_typed(small: list[str], capsys) -> None:
    Path("validation.yaml").write_text("data: {validation: {max_tasks: 2}}")
    second = str(ROOT / "callbacks/kl_schedule_transition.yaml")
    extra = ["--config", SWITCH, "--config", second, "--config", "validation.yaml", "--data.validation.n", "3"]
    with pytest.raises(SystemExit) as stop:
        main([*small, *extra, "--print_config"])
    assert stop.value.code in (0, None)
    config = yaml.safe_load(capsys.readouterr().out)
    names = [callback["class_path"].split(".")[-1] for callback in config["trainer"]["callbacks"]]
    assert names == ["ClippingTriggeredNormalization", "KLScheduleTransition"]
    assert config["data"]["validation"] == {"n": 3, "temperature": 1.0, "max_tasks": 2, "engine": None}


@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available")
@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_run_goes_on_by_its_own_command(small: list[str], capsys) -> None:
    """The first time there is nothing to resume, later there is; a run that is over ends at once."""
    import torch

    def version(folder: str) -> int:
        return torch.load(Path(folder, "last.ckpt"), weights_only=False)["policy_version"]

    again = [*small, "--checkpoint.dirpath", "long", "--ckpt_path", "last"]
    for collections, versions in ((1, 1), (3, 3), (3, 3)):
        main([*again, "--trainer.max_epochs", str(collections)])
        assert version("long") == versions
    main([*small, "--checkpoint.dirpath", "whole", "--trainer.max_epochs", "3"])
    ours, whole = (torch.load(Path(f, "last.ckpt"), weights_only=False)["state_dict"] for f in ("long", "whole"))
    assert all(torch.equal(ours[name], whole[name]) for name in whole)


SLURM = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
         "SLURM_NODELIST": "127.0.0.1", "SLURM_JOB_NAME": "long", "SLURM_NTASKS_PER_NODE": "1"}  # fmt: skip


@pytest.mark.slow
def test_a_preempted_job_ends_cleanly_and_its_next_life_goes_on(small: list[str]) -> None:
    """As in a Slurm job of its own: SIGUSR1 comes before the time is over, SIGTERM at preemption."""
    command = [sys.executable, "-m", "sorl_lightning", *small, "--checkpoint.dirpath", "long", "--ckpt_path", "last"]
    environment = {**os.environ, **SLURM, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"}
    last, written = Path("long/last.ckpt"), 0.0
    for name in ("SIGUSR1", "SIGTERM"):
        endless = [*command, "--trainer.max_epochs", "100000"]
        process = subprocess.Popen(
            endless, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        while process.poll() is None and not (last.exists() and last.stat().st_mtime > written):
            time.sleep(0.1)
        process.send_signal(getattr(signal, name))
        text = process.communicate()[0]
        assert process.returncode == 0, text
        assert f"sorl: stopped by {name}; resume with --ckpt_path" in text
        assert "scontrol" not in text
        written = last.stat().st_mtime
    import torch

    collections = torch.load(last, weights_only=False)["policy_version"]
    assert collections >= 2
    main([*small, "--checkpoint.dirpath", "whole", "--trainer.max_epochs", str(collections)])
    ours, whole = (torch.load(path, weights_only=False)["state_dict"] for path in (last, "whole/last.ckpt"))
    assert all(torch.equal(ours[name], whole[name]) for name in whole)


def test_tensorboard_has_rollout_training_and_throughput(small: list[str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    main(small)
    (folder,) = Path("runs").rglob("version_0")
    events = EventAccumulator(str(folder))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    expected = {
        "rollout/success", "rollout/return", "rollout/turns", "rollout/tokens", "rollout/ending/done",
        "rollout/ending/turn_limit", "rollout/ending/context_limit", "rollout/seconds", "rollout/failed_groups",
        "train/loss", "train/ratio", "train/ratio_max", "train/clip_fraction", "train/clip_fraction_turns",
        "train/entropy", "train/grad_norm", "train/grad_norm_clipped", "train/staleness", "collection",
        "throughput/generated_tokens_per_second", "throughput/trained_tokens_per_second", "policy_version",
        "throughput/loop_pause_seconds",
    }  # fmt: skip
    assert expected <= tags
    assert [event.step for event in events.Scalars("rollout/success")] == [0, 1]  # versions that were rolled out
    by_collection = EventAccumulator(str(folder / "by_collection"))
    by_collection.Reload()
    assert expected <= set(by_collection.Tags()["scalars"])
    assert [event.step for event in by_collection.Scalars("train/loss")] == [0, 1]
    assert set(events.Tags()["tensors"]) == {"custom_scalars__config__", "rollout/trajectories/text_summary"}
    assert len((folder / "trajectories/0000.jsonl").read_text().splitlines()) == 4  # of collection 0


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--data.max_trns", "3"], "max_trns"),
        (["--data.max_tur", "3"], "max_tur"),
        (["--data.environment.game", "chess"], "game is 'chess', it can be one of: coin"),
        (["--data.environment.train_tasks", "0"], "no tasks in its 'train' split"),
        (["--data.group_size", "1"], "data.group_size must be at least 2, got 1"),
        (["--data.max_turns", "0"], "data.max_turns must be at least 1, got 0"),
        (["--data.context_limit", "20"], "leaves no room in context_limit=20"),
        (
            ["--model.policy", "nowhere/at/all"],
            "model.policy: no model at 'nowhere/at/all': there is no such folder",
        ),
        (["--model.policy", "runs/coin_student/policy"], "sorl fit --config sorl:coin_student makes it"),
        (["--model.policy", "small.yaml"], "sorl export CHECKPOINT FOLDER"),
        (["--model.objective.ratio", "word"], "ratio"),
        (["--config", "sorl:nothing"], "no config or switch 'sorl:nothing'"),
    ],
)
def test_what_cannot_work_ends_in_one_sentence(
    small: list[str], extra: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = sentence([*small, *extra], capsys)
    assert message in text
    assert "Traceback" not in text


def test_where_no_bar_can_move_a_run_says_a_line_a_collection(small: list[str], capsys) -> None:
    main([*small, "--trainer.enable_progress_bar", "true"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("sorl: collection")]
    assert [line.split(",")[0] for line in lines] == ["sorl: collection 1 of 2", "sorl: collection 2 of 2"]
    assert all("rollout/success 0." in line and line.endswith(" s") for line in lines)
    main(small)
    assert "sorl: collection" not in capsys.readouterr().out


def test_figures_of_a_validation_are_said_once(small: list[str], capsys) -> None:
    often = [
        "--trainer.limit_val_batches",
        "1.0",
        "--trainer.check_val_every_n_epoch",
        "2",
        "--trainer.max_epochs",
        "3",
    ]
    main([*small, *often, "--trainer.enable_progress_bar", "true"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("sorl: collection")]
    assert ["val/success" in line for line in lines] == [False, True, False]


def test_a_test_without_a_checkpoint_says_so_and_a_report_shows_the_run_that_trained(small: list[str], capsys) -> None:
    main(small)
    main(["test", *small[1:]])
    assert "sorl: no --ckpt_path is given: this measures model.policy as it is" in capsys.readouterr().out
    (checkpoint,) = Path("runs").rglob("version_0/checkpoints/last.ckpt")
    main(["test", *small[1:], "--ckpt_path", str(checkpoint)])
    assert "--ckpt_path" not in capsys.readouterr().out
    pytest.importorskip("jinja2")
    main(["report", "runs"])
    assert re.search(r"holds \d runs; the latest that trained is \S*version_0$", capsys.readouterr().out, re.MULTILINE)


def test_a_setting_is_refused_before_the_warm_start_is_trained(small: list[str], capsys) -> None:
    Path("start.yaml").write_text("warm_start: {config: small.yaml, folder: made/policy}")
    extra = ["--config", "start.yaml", "--model.policy", "sorl_lightning.models.Pretrained"]
    refused = [*small, *extra, "--model.policy.path", "made/policy", "--data.group_size", "0"]
    assert "data.group_size" in sentence(refused, capsys)
    assert "is not there yet" not in capsys.readouterr().out
    assert not Path("made").exists()


def test_the_warm_start_is_trained_once_and_then_found(small: list[str], capfd) -> None:
    config = yaml.safe_load(Path("small.yaml").read_text())
    Path("first.yaml").write_text(yaml.safe_dump({**config, "hf_export": {"folder": "made/policy"}}))
    Path("start.yaml").write_text("warm_start: {config: first.yaml, folder: made/policy}")
    extra = ["--config", "start.yaml", "--model.policy", "sorl_lightning.models.Pretrained"]
    for told in (True, False):
        main([*small, *extra, "--model.policy.path", "made/policy"])
        said = capfd.readouterr().out
        assert ("made/policy is not there yet: training it" in said) == told
        assert ("made/policy is there, and is not trained again" in said) != told


def test_debug_shows_where_an_error_came_from(small: list[str]) -> None:
    with pytest.raises(ConfigurationError):
        main([*small, "--debug", "--data.max_turns", "0"])


def test_a_warm_start_is_trained_only_for_a_model_that_is_used(small: list[str], capsys) -> None:
    start = ["--warm_start.config", "missing.yaml", "--warm_start.folder", "runs/there"]
    main([*small, *start, "--trainer.max_epochs", "1"])
    assert "not there yet" not in capsys.readouterr().out
    policy = ["--model.policy", "sorl_lightning.models.Pretrained", "--model.policy.path", "runs/there"]
    assert "warm_start.config 'missing.yaml' ended with code" in sentence([*small, *start, *policy], capsys)


def test_a_policy_may_come_from_the_run_before_the_warm_start(tmp_path: Path) -> None:
    start = WarmStart(config="sorl:coin_teacher", folder=str(tmp_path / "teacher"))
    check_policy("runs/absent/policy", start)
    (tmp_path / "teacher").mkdir()  # nothing will be trained any more
    for found in (start, None):
        with pytest.raises(ConfigurationError, match=r"runs/absent/policy"):
            check_policy("runs/absent/policy", found)


def test_what_ships_is_found_by_name() -> None:
    first, quickstart, switch = shipped_files(
        ["--config", "sorl:quickstart", "--config=sorl:clipping_triggered_normalization"]
    )
    assert first == "--config"
    assert quickstart.endswith("configs/quickstart.yaml")
    assert switch.startswith("--config=/")
    elsewhere = ["--config", "plain.yaml", "--model.policy.tokenizer", "sorl:textworld", "sorl:quickstart"]
    assert shipped_files(elsewhere) == elsewhere


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", sorl_lightning.__name__, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "fit" in done.stdout
