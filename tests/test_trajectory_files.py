"""The trajectory log on disk: whole lines whatever happens, each trajectory once."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sorl_lightning.trajectory_files import TrajectoryFiles


def records(*collections: int) -> list[dict]:
    return [{"collection": number, "sibling": s, "task": "é\n</script>"} for number in collections for s in range(2)]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    files = TrajectoryFiles(tmp_path / "log")
    assert list(files) == []
    files.append([])
    assert not files.folder.exists()
    ratios = np.array([0.1, 1.0, float("nan")], dtype=np.float32)
    files.append([{**records(0)[0], "ratio": ratios}])
    files.append(records(1))
    first, *others = files
    assert first["ratio"][2] is None
    assert np.array_equal(np.float32(first["ratio"][:2]), ratios[:2])
    assert others == records(1)


def test_a_full_file_is_followed_by_another_and_the_order_is_kept(tmp_path: Path) -> None:
    files = TrajectoryFiles(tmp_path, max_bytes=100)
    for collection in range(12):
        files.append(records(collection))
    assert len(files.paths) > 10
    assert all(path.stat().st_size < 200 for path in files.paths)
    assert list(files) == records(*range(12))
    assert list(TrajectoryFiles(tmp_path)) == records(*range(12))


def test_a_kill_at_any_byte_leaves_whole_lines_and_a_resumed_run_has_each_once(tmp_path: Path) -> None:
    files = TrajectoryFiles(tmp_path)
    files.append(records(0, 1, 2))
    (path,) = files.paths
    held = path.read_bytes()
    for length in range(len(held)):
        path.write_bytes(held[:length])
        assert list(files) == records(0, 1, 2)[: held[:length].count(b"\n")]
        resumed = min(held[:length].count(b"\n") // 2, 2)  # the checkpoint of the last whole collection
        files.rewind(resumed)
        files.append(records(*range(resumed, 3)))
        assert list(files) == records(0, 1, 2)
    files.rewind(0)
    assert list(files) == []
