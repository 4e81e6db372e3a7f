"""Every code block of the documentation runs, every command parses, every name and link leads somewhere."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from conftest import TINY, agent
from doubles import Countdown, ScriptedEngine
from sorl_lightning import cli
from sorl_lightning.callbacks import (
    ATODAnnealing,
    ClippingMonitor,
    ClippingTriggeredNormalization,
    GuidedOPD,
    RolloutDepthController,
    TrajectoryLog,
    TurnDiagnosis,
)
from sorl_lightning.critic import Critic
from sorl_lightning.datamodule import RolloutDataModule
from sorl_lightning.objectives import Distillation, Mismatch, PolicyGradient
from sorl_lightning.rollout.stream_figures import StreamFigures
from sorl_lightning.teachers import LocalTeacher

ROOT = Path(__file__).parents[1]
PAGES = sorted(page for page in (ROOT / "docs").rglob("*.md") if "results" not in page.parts)
PAGES += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "callbacks/README.md")]
ROOMS = ("functional", "rollout", "callbacks", "control", "critic", "datamodule", "interfaces", "models", "module",
         "objectives", "lora", "packaged", "adapters", "cache", "streams", "teachers", "student_teacher",
         "turn_records", "tally", "step_guard", "sharding", "strategies", "ranks", "checkpoints", "testing",
         "types", "errors", "cli", "commands", "trajectory_files", "report", "annotation", "figures",
         "combinations", "served_teacher")  # fmt: skip


def label(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[str]:
    """Fenced blocks, each after as many empty lines as put a traceback on the page's own line."""
    text = page.read_text()
    found = re.finditer(rf"^```(?:{'|'.join(languages)})\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return ["\n" * text.count("\n", 0, match.start(1)) + match[1] for match in found]


def commands(page: Path) -> Iterator[list[str]]:
    """Arguments of each ``sorl`` command, without the name and environment variables before it."""
    for block in blocks(page, "bash", "sh", "console"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.replace("-m sorl_lightning ", "sorl "), comments=True)
            if words[:1] == ["torchrun"]:
                words = words[words.index("sorl") :]
            names = [n for n, word in enumerate(words) if word.rsplit("/")[-1] == "sorl"]
            if names and all("=" in word or word == "$" for word in words[: names[0]]):
                yield words[names[0] + 1 :]


def class_paths(node: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(node, dict):
        if "class_path" in node:
            yield node["class_path"], node.get("init_args", {})
        node = list(node.values())
    if isinstance(node, list):
        for child in node:
            yield from class_paths(child)


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_a_page_does_what_it_says(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("configs", "callbacks"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    namespace = types.ModuleType("my_project")  # the file that the pages tell their reader to write
    monkeypatch.setitem(sys.modules, "my_project", namespace)
    for source in blocks(page, "python"):
        exec(compile(source, str(page), "exec"), namespace.__dict__)
    for source in blocks(page, "yaml"):
        if named := re.match(r"# (\S+\.yaml)\n", source.lstrip("\n")):
            (tmp_path / named[1]).write_text(source)
        for path, arguments in class_paths(yaml.safe_load(source)):
            module, _, name = path.rpartition(".")
            parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
            assert set(arguments) <= set(parameters), f"{path} has no such arguments"
    for arguments in commands(page):
        check_command(arguments)


def check_command(arguments: list[str]) -> None:
    """Parse a command up to where it would build the trainer."""
    inner = 2 if arguments[0] == "data" else 1 if arguments[0] in cli.COMMANDS else len(arguments)
    asked = [] if "--help" in arguments else ["--print_config"]
    with pytest.raises(SystemExit) as stop:
        cli.main([*arguments[:inner], *asked, *arguments[inner:]])
    assert stop.value.code in (0, None), f"sorl {shlex.join(arguments)}: {stop.value.code}"


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_commands_beside_sorl_name_what_there_is(page: Path) -> None:
    """Targets of the Makefile, extras of the package, scripts of the repository; nothing else is asked of a reader."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    for block in blocks(page, "bash", "sh", "console"):
        for line in block.replace("\\\n", " ").splitlines():
            words = [word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z_]+=", word)]
            program = words[0].rsplit("/")[-1] if words else "sorl"
            if program == "make":
                assert words[1] in targets, line
            elif program == "pip":
                found = re.findall(r"sorl-lightning\[([\w,]+)\]", line)
                assert set(",".join(found).split(",")) - {""} <= set(extras), line
            elif program == "python":
                assert (ROOT / words[1]).exists(), line
            else:
                assert program in ("sorl", "torchrun", "tensorboard"), line


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_names_and_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for name in re.findall(rf"`((?:{'|'.join(ROOMS)})(?:\.\w+)+)`", text):
        assert resolves(f"sorl_lightning.{name}"), f"{label(page)} names {name}"
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), f"{label(page)} links to {target}"
    for path in re.findall(
        r"`((?:src|tests|docs|configs|callbacks|functional|rollout)/[\w/.-]+\.(?:py|yaml|md))`", text
    ):
        assert (ROOT / path).exists() or (ROOT / "src/sorl_lightning" / path).exists(), f"{label(page)} names {path}"


def resolves(name: str) -> bool:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if not hasattr(found, part):
                return part in getattr(found, "__dataclass_fields__", {})
            found = getattr(found, part)
        return True
    return False


def test_the_table_of_figures_is_what_a_run_writes(fit: Any, tmp_path: Path) -> None:
    cells = re.findall(r"^\| (`.+?`) \|", (ROOT / "docs/timeline.md").read_text(), re.MULTILINE)
    documented = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    data = RolloutDataModule(
        Countdown(), ScriptedEngine(), tasks_per_collection=2, group_size=2, max_turns=2, max_tokens=4
    )
    reward = PolicyGradient(kl_coefficient=0.1, advantage="gae", old="recompute", mismatch=Mismatch())
    watchers = [
        ClippingMonitor(), ClippingTriggeredNormalization(rule="max1"), TrajectoryLog(), RolloutDepthController(),
        GuidedOPD(), ATODAnnealing(), TurnDiagnosis(every_n_collections=1),
    ]  # fmt: skip
    module = agent(objective=Distillation(reward=reward), teacher=LocalTeacher(TINY), critic=Critic())
    logger = TensorBoardLogger(tmp_path, name="", version="run", default_hp_metric=False)
    fit(module, data, limit_val_batches=1, logger=logger, log_every_n_steps=1, callbacks=watchers)
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    written = {
        re.sub(r"(ending|environment)/\w+", r"\1/NAME", re.sub(r"(turns/\w+)/\d+", r"\1/N", tag))
        for tag in events.Tags()["scalars"]
    }
    written |= {tag.removesuffix("/text_summary") for tag in events.Tags()["tensors"]}
    written |= {re.sub(r"diagnosis/\w+", "diagnosis/NAME", tag) for tag in events.Tags()["images"]}
    assert written <= documented
    unwritten = documented - written
    clipping = {name.replace("normalization", "clipping") for name in written if name.startswith("normalization/")}
    streaming = {f"rollout/{name}" for name in StreamFigures().metrics}
    imitation, served = {"train/nll", "val/nll"}, {"engine/push_seconds", "engine/probe_difference"}
    # Tests of imitation, VLLMEngine and streaming look for theirs; the monitor's are those without the normalization.
    assert unwritten == imitation | served | clipping | streaming


def test_every_room_is_on_the_floor_plan() -> None:
    plan = (ROOT / "docs/floor_plan.md").read_text()
    package = ROOT / "src/sorl_lightning"
    rooms = [path for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    rooms += (package / "functional").glob("*.py")
    missing = [room.stem for room in rooms if not room.name.startswith("__") and room.stem not in plan]
    assert set(missing) <= {"checks"}


def test_every_switch_has_its_row() -> None:
    table = (ROOT / "callbacks/README.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    assert rows == {path.stem for path in (ROOT / "callbacks").glob("*.yaml")}


def test_a_command_with_a_misspelt_setting_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError):
        check_command(["fit", "--config", "sorl:quickstart", "--data.max_trns", "3"])
