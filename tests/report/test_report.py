"""The report's numbers are the event files', its texts cannot break it, and what is no run is a sentence."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from conftest import agent
from doubles import Countdown, ScriptedEngine
from reporting import settings, write_run
from sorl_lightning.callbacks import ClippingMonitor, CollectionAxis, RolloutDepthController, TrajectoryLog
from sorl_lightning.cli import main
from sorl_lightning.datamodule import RolloutDataModule
from sorl_lightning.report.page import page
from sorl_lightning.report.runs import labels_of, read_run
from sorl_lightning.report.trajectories import spaced
from sorl_lightning.trajectory_files import TrajectoryFiles


def data_of(html: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    return json.loads(text)


def events_of(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={SCALARS: 0})
    events.Reload()
    return events


def sections_of(html: str) -> list[str]:
    return re.findall(r'<section id="(\w+)"', html)


def refusal(*arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["report", *arguments])
    return str(stop.value.code)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("runs")
    return [
        write_run(root / "a", seed=0),
        write_run(root / "b", seed=1, depth_control=True, config=settings("token", tasks=3)),
    ]


def test_the_embedded_numbers_are_tensorboards(fit: Any, tmp_path: Path) -> None:
    data = RolloutDataModule(
        Countdown(), ScriptedEngine(), tasks_per_collection=2, group_size=2, max_turns=3, max_tokens=4, mini_batches=2
    )
    watchers = [ClippingMonitor(), RolloutDepthController(), CollectionAxis(), TrajectoryLog(1, None)]
    logger = TensorBoardLogger(tmp_path, name="", version="run", default_hp_metric=False)
    settings = {"limit_val_batches": 1, "log_every_n_steps": 1, "max_epochs": 3}
    fit(agent(), data, logger=logger, callbacks=watchers, **settings)
    (run,) = data_of(page([read_run(tmp_path / "run", "run")]))["runs"]
    for part, folder in (("figures", "."), ("by_collection", "by_collection")):
        events = events_of(tmp_path / "run" / folder)
        tags = set(events.Tags()["scalars"])
        assert {"rollout/success", "val/success", "train/clip_fraction", "clipping/bias_norm", "depth/cap"} <= set(
            run[part]
        )
        assert set(run[part]) <= tags
        for tag, series in run[part].items():
            written = events.Scalars(tag)
            assert series["steps"] == [event.step for event in written], tag
            assert np.array_equal(np.float32(series["values"]), np.float32([e.value for e in written])), tag
            seconds = [event.wall_time - events.FirstEventTimestamp() for event in written]
            np.testing.assert_allclose(series["seconds"], seconds, atol=0.006)
    by_turn = {tag for tag in events.Tags()["scalars"] if tag.startswith("turns/")}
    assert by_turn
    assert by_turn <= set(run["by_collection"])


def test_sections_are_those_of_which_something_was_written(made: list[Path]) -> None:
    first, second = (page([read_run(folder, "run")]) for folder in made)
    assert sections_of(first) == [
        "success",
        "turns",
        "clipping",
        "bias",
        "learning",
        "throughput",
        "settings",
        "trajectories",
        "gaps",
    ]
    assert "RolloutDepthController" in first
    assert "depth" in sections_of(second)
    assert "Weight of turns" in second
    assert "Weight of turns" not in first
    assert "gaps" not in sections_of(second)


def test_gaps_are_named(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("rollout/success", 0.5, 0)
    html = page([read_run(tmp_path, "bare")])
    assert sections_of(html) == ["success", "gaps"]
    assert "Success by collection" not in html  # which nothing wrote
    for missing in ("by_collection", "config.yaml", "trajectories/", "turns/", "throughput/", "val/"):
        assert f"<td>{missing}</td>" in html


def test_settings_are_compared(made: list[Path]) -> None:
    html = page([read_run(folder, folder.name) for folder in made])
    table = re.search(r'<section id="settings".*?</table>', html, re.DOTALL)[0]
    rows = re.findall(r'<th scope="row">(.*?)</th>\s*<td>(.*?)</td><td>(.*?)</td>', table)
    assert sorted(rows) == [("data.tasks", "—", "3"), ("model.objective.ratio", "turn", "token")]
    assert re.findall(r"<summary>(\d+) settings that all runs share", html) == ["6"]
    assert "trainer.callbacks.ClippingMonitor.turns" in html
    assert '<td colspan="2">null</td>' in html


def test_texts_of_a_run_cannot_break_the_page(made: list[Path]) -> None:
    html = page([read_run(made[0], "<img src=x onerror=alert(1)>")])
    assert html.count("</script>") == html.count("<script")
    assert "<img src=x" not in html
    assert not re.search(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"(?!data:,)", html)
    tokens = [turn["tokens"]["piece"] for row in data_of(html)["browser"]["rows"] for turn in row["turns"]]
    assert any("</script>" in pieces for pieces in tokens)


def test_browsed_trajectories_are_the_logged_ones(made: list[Path]) -> None:
    browser = data_of(page([read_run(made[0], "run")]))["browser"]
    lines = list(TrajectoryFiles(made[0] / "trajectories"))
    assert len(browser["rows"]) == browser["logged"][0] == len(lines) == 24
    for row, line in zip(browser["rows"], lines, strict=True):
        assert browser["texts"][row["task"]] == line["task"]
        assert [row[name] for name in ("reward", "success", "ending")] == [
            line[n] for n in ("reward", "success", "ending")
        ]
        for short, turn in zip(row["turns"], line["turns"], strict=True):
            assert browser["texts"][short["observation"]] == turn["observation"]
            assert set(short["tokens"]) == set(turn["tokens"])
            for name, values in turn["tokens"].items():
                kept = short["tokens"][name]
                kept = kept if isinstance(kept, list) else [kept] * short["count"]
                if name == "piece":
                    assert kept == values
                else:
                    np.testing.assert_allclose(kept, values, rtol=5e-4)


def test_no_more_trajectories_than_asked_for_and_the_page_says_so(made: list[Path]) -> None:
    html = page([read_run(folder, folder.name) for folder in made], trajectories=10)
    assert len(data_of(html)["browser"]["rows"]) == 10
    assert "10 of 48 logged ones" in html


def test_long_curves_keep_their_ends(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(2500):
            writer.add_scalar("train/entropy", step, step)
    series = data_of(page([read_run(tmp_path, "long")]))["runs"][0]["figures"]["train/entropy"]
    assert series["of"] == 2500
    assert len(series["values"]) == 1000
    assert series["values"] == series["steps"]
    assert (series["steps"][0], series["steps"][-1]) == (0, 2499)


@pytest.mark.parametrize(("count", "limit"), [(0, 0), (5, 0), (5, 1), (5, 5), (1000, 7), (1001, 1000)])
def test_spaced(count: int, limit: int) -> None:
    places = spaced(count, limit)
    assert len(places) == min(count, limit)
    assert all(0 <= place < count for place in places)
    assert limit < 2 or {0, count - 1} <= places


def test_of_a_step_that_was_written_again_the_later_value_counts(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        with SummaryWriter(str(tmp_path), filename_suffix=f".{value}") as writer:
            writer.add_scalar("train/entropy", value, 3)
    assert read_run(tmp_path, "run").figures["train/entropy"].values == [2.0]


def test_labels_are_what_differs() -> None:
    assert labels_of([Path("/x/runs/quickstart/lightning_logs/version_3")]) == ["quickstart/version_3"]
    assert labels_of([Path(f"/x/runs/{name}/lightning_logs/version_0") for name in "ab"]) == ["a", "b"]
    assert labels_of([Path(f"/x/runs/q/lightning_logs/version_{n}") for n in (0, 1)]) == ["version_0", "version_1"]


def test_the_command_writes_the_file_and_takes_the_latest_run(made: list[Path], tmp_path: Path, capsys: Any) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")
    main(["report", *map(str, made), "--output", str(target), "--labels", "[turn,token]"])
    assert [run["label"] for run in data_of(target.read_text())["runs"]] == ["turn", "token"]
    assert list(tmp_path.iterdir()) == [target]
    for number in (0, 1):
        write_run(tmp_path / f"logs/version_{number}", collections=2, trajectories=0)
    main(["report", "--output", str(target), str(tmp_path / "logs")])
    assert "holds 2 runs; the latest that trained is" in capsys.readouterr().out
    assert "version_1" in target.read_text()


def test_what_cannot_be_reported_is_a_sentence(made: list[Path], tmp_path: Path, monkeypatch: Any) -> None:
    run, output = str(made[0]), ("--output", str(tmp_path / "out.html"))
    assert "'nowhere' is not a folder" in refusal("nowhere", *output)
    assert "is no run: there is no TensorBoard event file" in refusal(str(tmp_path), *output)
    assert "is given twice" in refusal(run, run, *output)
    assert "labels: one a run is needed, 1 in all, got 2" in refusal(run, "--labels", "[a,b]", *output)
    assert "must be a file in a folder that exists" in refusal(run, "--output", str(tmp_path / "no/out.html"))
    assert "runs: name at least one folder" in refusal(*output)
    assert "trajectories must be 0 or more, got -1" in refusal(run, "--trajectories", "-1", *output)
    with SummaryWriter(str(tmp_path / "empty")):
        pass
    assert "hold no figure yet" in refusal(str(tmp_path / "empty"), *output)
    folder = write_run(tmp_path / "broken", collections=2, trajectories=2)
    (log,) = TrajectoryFiles(folder / "trajectories").paths
    held = log.read_text()
    log.write_text(held.replace('"schema":1', '"schema":7', 1))
    assert "has schema 7, and this version of sorl reads schema 1" in refusal(str(folder), *output)
    log.write_text("nonsense\n" + held)
    assert "line 1 of the trajectory log" in refusal(str(folder), *output)
    log.unlink()
    (folder / "config.yaml").write_text("a: [")
    assert "is no YAML" in refusal(str(folder), *output)
    many = [str(write_run(tmp_path / f"many/{n}", collections=1, trajectories=0)) for n in range(9)]
    assert "at most 8 can be told apart" in refusal(*many, *output)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert "pip install 'sorl-lightning[report]'" in refusal(run, *output)
