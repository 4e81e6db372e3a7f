"""Weights broadcast over TCP, from memory to memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from sorl_lightning.errors import EngineOutage
from sorl_lightning.rollout.vllm.transports.buckets import Bucket, BucketTransport
from sorl_lightning.rollout.vllm.transports.transport import Post


class GlooTransport(BucketTransport):
    """Tensors are broadcast from memory to memory, over TCP, one by one.

    Args:
        host: address under which the servers reach the trainer.
        port: of the meeting point; 0 takes a free one.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.host = host
        self.port = port
        self._group: Any = None

    @property
    def backend(self) -> str:
        """The plug-in's backend "gloo"."""
        return "gloo"

    def connect(self, post: Post, workers: Sequence[int], timeout: float) -> None:
        """Form a group of the trainer and all workers; an older one is left."""
        world = 1 + sum(workers)
        limit = timedelta(seconds=timeout)
        store = dist.TCPStore(self.host, self.port, world, is_master=True, timeout=limit, wait_for_workers=False)
        offsets = [1 + sum(workers[:index]) for index in range(len(workers))]
        meeting = {"host": self.host, "port": store.port, "world_size": world, "timeout": timeout}
        joined = post(
            "/init_weight_transfer_engine",
            [{"init_info": {**meeting, "rank_offset": offset}} for offset in offsets],
        )
        formed = in_thread(lambda: dist.ProcessGroupGloo(store, 0, world, limit))
        together(joined, formed, timeout)
        self._group = formed.result()

    def send(self, bucket: Bucket, post: Post) -> None:
        """Announce names and shapes, and broadcast while the servers receive."""
        group = self._group
        tensors = [tensor.cpu().contiguous() for _, tensor in bucket]
        announced = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
        }
        received = post("/update_weights", [{"update_info": announced}])

        def broadcast() -> None:
            for tensor in tensors:
                group.broadcast([tensor], dist.BroadcastOptions()).wait()

        together(received, in_thread(broadcast), None)

    def close(self) -> None:
        """Leave the group."""
        self._group = None


def in_thread(work: Callable[[], Any]) -> Future[Any]:
    """Run in a thread that nobody waits for at exit: a broadcast without listeners ends by its own timeout only."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="weight-broadcast", daemon=True).start()
    return future


def together(servers: Future[Any], trainer: Future[Any], timeout: float | None) -> None:
    """Wait for both sides of an exchange; of two errors the servers' is the one that explains.

    Raises:
        EngineOutage: an error of the trainer's side, or time is over.
    """
    done, _ = wait((servers, trainer), timeout=timeout, return_when=FIRST_EXCEPTION)
    if servers in done or (trainer in done and trainer.exception() is not None):
        try:
            servers.result(timeout=5.0)  # the servers' own words arrive a moment after the connection has gone
        except FutureTimeout:
            servers.cancel()
    if trainer in done and (error := trainer.exception()) is not None:
        raise EngineOutage(f"weights could not be broadcast: {error}") from error
    if trainer not in done or servers not in done:
        raise EngineOutage(f"the servers did not join the weight broadcast within {timeout} s")
