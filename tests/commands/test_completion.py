"""The tab key, in a real shell."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# What bash does at the tab key: the function that the script has registered, with the words so far.
TAB = """source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_TYPE=9
"$(complete -p sorl | sed 's/.*-F \\([^ ]*\\).*/\\1/')" sorl "${COMP_WORDS[COMP_CWORD]}" ""
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("shtab")
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")
    path = tmp_path_factory.mktemp("completion") / "sorl"
    command = [sys.executable, "-m", "sorl_lightning", "completion", "bash"]  # without the classes of other tests
    path.write_bytes(subprocess.run(command, capture_output=True, check=True).stdout)
    return path


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("fit --trainer.max_e", {"--trainer.max_epochs"}),
        ("fit --config x.yaml --model.objective.epsilon_h", {"--model.objective.epsilon_high"}),
        ("fit --data.environment.ga", {"--data.environment.game"}),
        ("repo", {"report"}),
        ("data fac", {"factbook"}),
        ("report --outp", {"--output"}),
        ("export --ch", set()),  # a word of its own, no option
    ],
)
def test_the_tab_key_completes(script: Path, words: str, completed: set[str]) -> None:
    command = ["bash", "-c", TAB, "bash", str(script), "sorl", *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert set(done.stdout.split()) == completed, done.stderr


def test_a_script_is_small_enough_to_be_read_at_every_start_of_a_shell(script: Path) -> None:
    assert script.stat().st_size < 1e6
