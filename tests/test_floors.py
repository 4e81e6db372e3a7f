"""Imports go down only, and Lightning stays upstairs."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
PACKAGE = "sorl_lightning"
FLOORS = {
    "": 5, "__main__": 5, "cli": 5, "agent_cli": 5, "trainer_settings": 5, "linked_settings": 5,
    "commands": 5, "report": 5,
    "module": 4, "datamodule": 4, "streams": 4, "turn_records": 4, "callbacks": 4, "strategies": 4, "checkpoints": 4,
    "trajectory_files": 4, "data_settings": 4, "collection_source": 4, "warm_start": 4, "combinations": 3,
    "rollout": 3, "testing": 3, "student_teacher": 3, "served_teacher": 3, "annotation": 3, "figures": 3,
    "held_out": 3,
    "objectives": 2, "models": 2, "networks": 2, "padding_free": 2, "causality": 2, "teachers": 2,
    "control": 2, "critic": 2, "value_networks": 2, "adapters": 2, "lora": 2, "packaged": 2,
    "step_guard": 2, "resuming": 2, "loading": 2, "tally": 2, "sharding": 2, "exports": 2, "ranks": 1,
    "functional": 1,
    "types": 0, "shipped": 0, "cache": 0, "errors": 0, "interfaces": 0, "assets": 0, "vllm_plugin": 0,
}  # fmt: skip
APART = {"module", "datamodule", "callbacks"}
FUNCTIONAL_MAY_IMPORT = {"torch", "jaxtyping", "typing_extensions"}
MODULES = sorted((SOURCE / PACKAGE).rglob("*.py"))


def room(module: str) -> str:
    """The first name below the package."""
    return [*module.split("."), ""][1]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {path}"
            inside = node.module == PACKAGE  # its names are modules
            found |= {f"{PACKAGE}.{alias.name}" for alias in node.names} if inside else {node.module or ""}
    return found


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_go_down_only(path: Path) -> None:
    here = room(module_name(path))
    for name in imports(path):
        if name.split(".")[0] == PACKAGE:
            there = room(name)
            assert FLOORS[there] <= FLOORS[here], f"{module_name(path)} imports {name} from a floor above"
            assert not ({here, there} <= APART and here != there), f"{here} and {there} must not know each other"
        if name.split(".")[0] in {"lightning", "pytorch_lightning"}:
            assert FLOORS[here] >= 4, f"{module_name(path)} imports Lightning below floor 4"


@pytest.mark.parametrize("path", [p for p in MODULES if "functional" in p.parts], ids=module_name)
def test_functional_is_torch_only(path: Path) -> None:
    import sys

    allowed = FUNCTIONAL_MAY_IMPORT | set(sys.stdlib_module_names) | {PACKAGE}
    assert {name.split(".")[0] for name in imports(path)} <= allowed


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_vllm_is_imported_inside_its_server_only(path: Path) -> None:
    plugin = room(module_name(path)) == "vllm_plugin"
    for name in imports(path):
        assert plugin or name.split(".")[0] != "vllm", f"{module_name(path)} imports {name}"
        own = name.split(".")[0] != PACKAGE or room(name) == "vllm_plugin"
        assert not plugin or own, "the plug-in must do without the rest of the package"
        assert plugin or room(name) != "vllm_plugin" or not name.startswith(PACKAGE)
