"""A run that is killed at any moment and resumed ends bitwise where the uninterrupted one does."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lives import Death, live
from processes import Died, launch

from sorl_lightning.critic import Critic

pytestmark = pytest.mark.distributed

DEATHS = [
    *(Death("collection", collection) for collection in range(1, 10)),
    *(Death("rollout", collection) for collection in (0, 4)),
    *(Death("optimiser", collection) for collection in (0, 5)),
    Death("validation", 3),
    *(Death("writing", collection) for collection in (0, 6)),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The uninterrupted run."""
    return launch(live, 1, str(tmp_path_factory.mktemp("whole")))


@pytest.fixture(scope="module")
def whole_pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(live, 2, str(tmp_path_factory.mktemp("pair")), None, 2, True)


def killed_and_resumed(folder: Path, death: Death, ranks: int = 1) -> list[dict[str, Any]]:
    with pytest.raises(Died):
        launch(live, ranks, str(folder), death, ranks, ranks > 1)
    return launch(live, ranks, str(folder), None, ranks, ranks > 1)


def same(resumed: list[dict[str, Any]], whole: list[dict[str, Any]], version: int = 40) -> None:
    for ours, theirs in zip(resumed, whole, strict=True):
        assert np.array_equal(ours["parameters"], theirs["parameters"])
        assert Counter(ours["trained"]) == Counter(theirs["trained"])
        assert ours["version"] == theirs["version"] == version
        assert ours["best"] == theirs["best"]


def test_every_trajectory_is_trained_once(whole) -> None:
    (run,) = whole
    assert len(run["trained"]) == len(set(run["trained"])) == 10 * 4 * 2
    assert {name for name in run["best"] if "best" not in name} == {"epoch=8.ckpt", "epoch=9.ckpt", "last.ckpt"}
    assert len([name for name in run["best"] if "best" in name]) == 1


@pytest.mark.parametrize("death", DEATHS, ids=lambda death: f"{death.place}-{death.collection}")
def test_one_process(tmp_path, whole, death) -> None:
    same(killed_and_resumed(tmp_path, death), whole)


PAIRED = [
    Death("collection", 4, rank=1),
    Death("rollout", 2, rank=0),
    Death("optimiser", 5, rank=1),
    Death("writing", 6),
]


@pytest.mark.parametrize("death", PAIRED, ids=lambda death: f"{death.place}-{death.collection}")
def test_two_sharded_processes(tmp_path, whole_pair, death) -> None:
    same(killed_and_resumed(tmp_path, death, ranks=2), whole_pair)


@pytest.mark.parametrize("backbone", ["own", "policy"])
def test_a_critic_is_resumed_with_its_policy(tmp_path, backbone) -> None:
    settings = (2, True, 3, 2, Critic(backbone=backbone, warmup=1))
    whole = launch(live, 2, str(tmp_path / "whole"), None, *settings)
    with pytest.raises(Died):
        launch(live, 2, str(tmp_path / "killed"), Death("optimiser", 2), *settings)
    same(launch(live, 2, str(tmp_path / "killed"), None, *settings), whole, version=12)
