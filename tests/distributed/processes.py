"""Run a function on several gloo processes of this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

# The server that forks them imports on its own: it knows no path but this one.
os.environ["PYTHONPATH"] = os.pathsep.join(map(str, sys.path))
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["conftest", "scenarios"])  # imported once, then forked


KILLED = ("a rank died", None)


class Died(Exception):
    """A rank was killed."""


def launch(function: Callable[..., Any], ranks: int, *arguments: Any, seconds: float = 300.0) -> list[Any]:
    """What ``function(*arguments)`` returns on each rank, as under torchrun.

    Raises:
        Died: a rank was killed.
        AssertionError: a rank raised, or did not end in time.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes, processes = [], []
    for rank in range(ranks):
        ours, theirs = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=_child, args=(theirs, rank, ranks, port, function, arguments), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        answers = [_answer(rank, pipe, seconds) for rank, pipe in enumerate(pipes)]
    finally:
        for process in processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()
    if any(process.exitcode == -signal.SIGKILL for process in processes) and any(a is KILLED for a in answers):
        raise Died
    failed = [text for text, _ in answers if text is not None]
    assert not failed, "\n".join(failed)
    return [result for _, result in answers]


def _answer(rank: int, pipe: Any, seconds: float) -> tuple[str | None, Any]:
    if not pipe.poll(seconds):
        return f"rank {rank} did not end in {seconds:g} seconds", None
    try:
        return pipe.recv()
    except EOFError:
        return KILLED


def _child(pipe: Any, rank: int, ranks: int, port: int, function: Callable[..., Any], arguments: Any) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "tests"}
    os.environ.update({name: str(value) for name, value in names.items()})
    try:
        pipe.send((None, function(*arguments)))
    except BaseException:
        pipe.send((f"rank {rank}:\n{traceback.format_exc()}", None))
