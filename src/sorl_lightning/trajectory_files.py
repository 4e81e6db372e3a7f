"""The trajectory log on disk: JSON lines, in files of bounded size; docs/trajectory_log.md describes a line."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from sorl_lightning.checkpoints import install, unfinished

SCHEMA = 1
Record = Mapping[str, Any]


class TrajectoryFiles:
    """Files ``0000.jsonl``, ``0001.jsonl``, ... of a folder, one trajectory a line, in the order of the run.

    A kill while a line is written leaves a beginning of it at the end of a file: readers pass over it, and ``rewind``
    cuts it off.

    Args:
        folder: made with the first line.
        max_bytes: a file that has reached this size gets no further line.
    """

    def __init__(self, folder: Path, max_bytes: int = 64_000_000) -> None:
        self.folder = folder
        self.max_bytes = max_bytes

    @property
    def paths(self) -> list[Path]:
        """The files, oldest first."""
        return sorted(self.folder.glob("*.jsonl"), key=lambda path: (len(path.name), path.name))

    def append(self, records: Iterable[Record]) -> None:
        """Write ``records``, NumPy arrays among their values as lists, numbers that are not finite as null."""
        options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
        lines = [orjson.dumps(record, option=options) for record in records]
        if not lines:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for line in lines:
            with self._open_file().open("ab", buffering=0) as file:  # one call of the system a line
                file.write(line)
        with self.paths[-1].open("rb") as file:
            os.fsync(file.fileno())

    def _open_file(self) -> Path:
        paths = self.paths
        if paths and paths[-1].stat().st_size < self.max_bytes:
            return paths[-1]
        return self.folder / f"{len(paths):04d}.jsonl"

    def rewind(self, collection: int) -> None:
        """Leave only whole lines of collections before ``collection``: what a run that starts there has not played."""
        for path in self.paths:
            held = path.read_bytes()
            kept = b"".join(line + b"\n" for line in whole_lines(held) if orjson.loads(line)["collection"] < collection)
            if kept == held:
                continue
            unfinished(path).write_bytes(kept)
            install(unfinished(path), path)

    def lines(self) -> Iterator[bytes]:
        """Whole lines as they stand in the files."""
        for path in self.paths:
            yield from whole_lines(path.read_bytes())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(orjson.loads, self.lines())


def whole_lines(held: bytes) -> Sequence[bytes]:
    """Lines that were written to their end; what stands behind the last line break was not."""
    return held.split(b"\n")[:-1]
