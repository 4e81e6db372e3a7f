"""What the listing commands print is what there is."""

from __future__ import annotations

import pytest
from packaging.requirements import Requirement

from sorl_lightning.cli import main
from sorl_lightning.commands import doctor
from sorl_lightning.shipped import shipped


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "220")


def test_every_environment_is_listed_with_its_extra_and_configs(capsys) -> None:
    main(["envs"])
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[2:] if line[:1] not in (" ", "")}
    assert set(lines) == {
        "TextWorldExpress", "AlfWorld", "ScienceWorld", "WebShop", "MultipleChoice", "MultiHopSearch", "ToolUse",
        "RecordedChats", "Mixture", "GymnasiumText", "GymnasiumActions",
    }  # fmt: skip
    assert "textworld" in lines["TextWorldExpress"].split()[1]
    assert "quickstart, quickstart_imitation" in lines["TextWorldExpress"]
    assert "Questions of one's own, answered with the help of tools." in lines["ToolUse"]


@pytest.mark.parametrize("kind", ["configs", "callbacks"])
def test_every_shipped_file_is_listed_with_a_line(kind, capsys) -> None:
    main([kind])
    lines = capsys.readouterr().out.splitlines()[2:]
    names = [line.split()[0] for line in lines]
    assert names == sorted(shipped(kind))
    assert all(len(line.split()) > 3 for line in lines)


@pytest.mark.parametrize("kind", ["envs", "configs", "callbacks"])
def test_names_are_whole_on_a_terminal_of_80_columns(kind, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    main([kind])
    words = capsys.readouterr().out.replace(",", "").split()
    assert set(shipped("configs" if kind == "envs" else kind)) & {"quickstart_imitation", "popd"} <= set(words)
    assert kind != "callbacks" or set(shipped(kind)) <= set(words)


def test_the_doctor_sees_versions_extras_and_a_run_that_works(capsys) -> None:
    main(["doctor"])
    text = capsys.readouterr().out
    (line,) = [line for line in text.splitlines() if line.startswith("torch ")]
    assert line.split()[1:] == ["2.13.0+cpu", "2.13.0"] or line.split()[2] == "2.13.0"
    assert "extra textworld: installed" in text
    assert "smoke run: 2 collections, 32 episodes, 2 updates in" in text


def test_a_version_that_does_not_fit_and_one_that_is_missing_are_told() -> None:
    assert doctor.installed(Requirement("torch>=99")).endswith("need >=99")
    assert doctor.installed(Requirement("no-such-package>=1")) == "missing"
    assert {"lora", "search", "vllm"} <= set(doctor.extras())
    assert [need.name for need in doctor.needs("lora")] == ["peft"]
    assert dict(doctor.pins())["types-pyyaml"].startswith("6.")
