"""Processes of a session, and the shared memory that they map, as /proc tells. Where there is no /proc: none."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

PROC, SHARED = Path("/proc"), "/dev/shm/"
NOT_THEIRS = "sorl-weights-"  # the trainer's own files, which a server has mapped to read them


def processes_of(session: int) -> list[int]:
    """Ids of the live processes of a session; zombies do not count."""
    found = []
    for entry in PROC.glob("[0-9]*"):
        try:
            # The name, in parentheses, may hold spaces; state, parent, group and session follow it.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(int(entry.name))
    return found


def shared_memory_of(processes: Iterable[int]) -> set[Path]:
    """Files under /dev/shm that any of these processes has mapped."""
    found = set()
    for pid in processes:
        try:
            lines = (PROC / str(pid) / "maps").read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            _, mark, name = line.partition(SHARED)
            if mark and not name.endswith("(deleted)") and NOT_THEIRS not in name:
                found.add(Path(SHARED + name))
    return found
