"""A run that is killed at any moment and resumed ends bitwise where the uninterrupted one does."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lives import ONE, PAIR, Death, Shape, live
from processes import Died, launch

from sorl_lightning.critic import Critic

pytestmark = pytest.mark.distributed

DEATHS = [
    *(Death("collection", collection) for collection in range(10)),
    *(Death("rollout", collection) for collection in (0, 4)),
    *(Death("optimiser", collection) for collection in (0, 5)),
    Death("validation", 3),
    *(Death(place, collection) for place in ("writing", "naming") for collection in (0, 6)),
]
Result = list[dict[str, Any]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The uninterrupted run."""
    return launch(live, 1, str(tmp_path_factory.mktemp("whole")))


@pytest.fixture(scope="module")
def whole_pair(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return launch(live, 2, str(tmp_path_factory.mktemp("pair")), None, 2, PAIR)


def killed_and_resumed(folder: Path, death: Death, ranks: int = 1, shape: Shape = ONE) -> Result:
    with pytest.raises(Died):
        launch(live, ranks, str(folder), death, ranks, shape)
    return launch(live, ranks, str(folder), None, ranks, shape)


def same(resumed: Result, whole: Result, version: int = 40) -> None:
    for ours, theirs in zip(resumed, whole, strict=True):
        assert np.array_equal(ours["parameters"], theirs["parameters"])
        assert Counter(ours["trained"]) == Counter(theirs["trained"])
        assert ours["version"] == theirs["version"] == version
        assert ours["files"] == theirs["files"]
        assert ours["left"] == []


def test_every_trajectory_is_trained_once(whole) -> None:
    (run,) = whole
    assert len(run["trained"]) == len(set(run["trained"])) == 10 * 4 * 2
    assert {name for name in run["files"] if "best" not in name} == {"epoch=8.ckpt", "epoch=9.ckpt", "last.ckpt"}
    assert len([name for name in run["files"] if "best" in name]) == 1


@pytest.mark.parametrize("death", DEATHS, ids=lambda death: f"{death.place}-{death.collection}")
def test_one_process(tmp_path, whole, death) -> None:
    same(killed_and_resumed(tmp_path, death), whole)


PAIRED = [
    Death("collection", 4, rank=1),
    Death("rollout", 2, rank=0),
    Death("optimiser", 5, rank=1),
    Death("validation", 3),
    Death("writing", 6),
]
ALL_PAIRED = [
    *(Death("collection", collection, rank=collection % 2) for collection in range(10)),
    *(Death("optimiser", collection, rank=0) for collection in (0, 9)),
    Death("validation", 9, rank=1),
    *(Death(place, collection) for place in ("writing", "naming") for collection in (0, 9)),
]


@pytest.mark.parametrize("death", PAIRED, ids=lambda death: f"{death.place}-{death.collection}")
def test_two_sharded_processes(tmp_path, whole_pair, death) -> None:
    same(killed_and_resumed(tmp_path, death, ranks=2, shape=PAIR), whole_pair)


@pytest.mark.slow
@pytest.mark.parametrize("death", ALL_PAIRED, ids=lambda death: f"{death.place}-{death.collection}")
def test_two_sharded_processes_at_every_collection(tmp_path, whole_pair, death) -> None:
    same(killed_and_resumed(tmp_path, death, ranks=2, shape=PAIR), whole_pair)


@pytest.mark.parametrize("backbone", ["own", "policy"])
def test_a_critic_is_resumed_with_its_policy(tmp_path, backbone) -> None:
    shape = Shape(strategy="fsdp2", epochs=3, critic=Critic(backbone=backbone, warmup=1))
    whole = launch(live, 2, str(tmp_path / "whole"), None, 2, shape)
    same(killed_and_resumed(tmp_path / "killed", Death("optimiser", 2), 2, shape), whole, version=12)


def test_a_folder_that_had_not_got_its_name_yet(tmp_path, whole_pair) -> None:
    """Between setting the older folder aside and naming the newer one there is no folder of that name."""
    folders = Shape(strategy="fsdp2 folders")
    resumed = killed_and_resumed(tmp_path, Death("naming", 6), ranks=2, shape=folders)
    assert (tmp_path / "last.ckpt").is_dir()
    same(resumed, whole_pair)


def resumed_as(folder: Path, first: Shape, second: Shape, ranks: tuple[int, int] = (1, 1)) -> Result:
    """Half a run in one shape, and the other half in another."""
    launch(live, ranks[0], str(folder), None, ranks[0], first)
    return launch(live, ranks[1], str(folder), None, ranks[1], second)


def scripted(**settings: Any) -> Shape:
    return Shape(**{"epochs": 4, "scripted": True, **settings})


def agree(ours: Result, theirs: Result) -> None:
    for share in ours:
        np.testing.assert_allclose(share["parameters"], theirs[0]["parameters"], rtol=0, atol=1e-8)
        assert Counter(share["trained"]) == Counter(theirs[0]["trained"])
        assert len(share["trained"]) == len(set(share["trained"])) == 4 * 4 * 2
        assert share["version"] == theirs[0]["version"]


def test_on_another_number_of_micro_batches(tmp_path) -> None:
    whole = launch(live, 1, str(tmp_path / "whole"), None, 1, scripted())
    halves = resumed_as(tmp_path / "halves", scripted(epochs=2), scripted(micro_batches=4))
    assert halves[0]["version"] == 16
    agree(halves, whole)


@pytest.mark.parametrize("pair", ["fsdp2", "fsdp2 folders", "ddp"])
def test_on_another_number_of_ranks(tmp_path, pair) -> None:
    """With one update a pass, whose trajectories are those of all ranks, the numbers are the same too."""
    one, two = scripted(mini_batches=1), scripted(mini_batches=1, strategy=pair)
    whole = launch(live, 1, str(tmp_path / "whole"), None, 1, one)
    if pair != "fsdp2 folders":  # which one process without FSDP2 does not read
        fewer = resumed_as(tmp_path / "fewer", scripted(mini_batches=1, strategy=pair, epochs=2), one, (2, 1))
        agree(fewer, whole)
    shrunk = resumed_as(tmp_path / "shrunk", scripted(mini_batches=1, strategy=pair, epochs=2), two, (2, 1))
    agree(shrunk, whole)
    grown = scripted(mini_batches=1, strategy=pair, epochs=2)
    agree(resumed_as(tmp_path / "grown", grown, two, (1, 2)), whole)


STREAMED = [
    (Death("collection", 1), 1, 2),
    (Death("collection", 5), 1, 1),
    (Death("collection", 9), 1, 2),
    (Death("rollout", 0), 1, 1),
    (Death("rollout", 4), 1, 2),
    (Death("optimiser", 9), 1, 1),
    (Death("validation", 3), 1, 2),
    (Death("writing", 6), 1, 1),
    (Death("collection", 4, rank=1), 2, 1),
    (Death("optimiser", 6), 2, 2),
]


@pytest.mark.parametrize(
    ("death", "ranks", "staleness"), STREAMED, ids=[f"{d.place}-{d.collection}-{r}-{s}" for d, r, s in STREAMED]
)
def test_streaming_trains_every_draw_once(tmp_path, death, ranks, staleness) -> None:
    shape = Shape(strategy="fsdp2" if ranks > 1 else None, max_staleness=staleness)
    for run in killed_and_resumed(tmp_path, death, ranks, shape):
        draws = Counter((group, sibling) for _, group, _, sibling in run["trained"])
        assert draws == Counter((group, sibling) for group in range(10 * 4) for sibling in range(2))
        assert run["version"] == 40
        last = Counter(collection for collection, *_ in run["trained"])
        assert last == dict.fromkeys(range(10), 4 * 2)
