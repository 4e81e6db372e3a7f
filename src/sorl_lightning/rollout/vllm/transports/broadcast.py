"""Weights broadcast from memory to memory: the trainer is rank 0 of a group, the servers' workers are the others."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from torch import Tensor

from sorl_lightning.errors import EngineOutage
from sorl_lightning.rollout.vllm.transports.buckets import Bucket, BucketTransport
from sorl_lightning.rollout.vllm.transports.transport import Post


class BroadcastTransport(BucketTransport):
    """Names and shapes are announced over HTTP, tensors broadcast one by one."""

    _group: Any = None

    @abstractmethod
    def meet(self, world: int, timeout: float) -> tuple[dict[str, Any], Callable[[], Any]]:
        """Open a meeting point for ``world`` processes: what the servers must know of it, and how to join as rank 0."""
        ...

    @abstractmethod
    def ready(self, tensor: Tensor) -> Tensor:
        """The tensor where it can be sent from, contiguous."""
        ...

    @abstractmethod
    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Send to all workers, in order; returns when they are on their way."""
        ...

    def connect(self, post: Post, workers: Sequence[int], timeout: float) -> None:
        """Form a group of the trainer and all workers; an older one is left."""
        world = 1 + sum(workers)
        offsets = [1 + sum(workers[:index]) for index in range(len(workers))]
        meeting, join = self.meet(world, timeout)
        joined = post(
            "/init_weight_transfer_engine",
            [{"init_info": {**meeting, "world_size": world, "rank_offset": offset}} for offset in offsets],
        )
        formed = in_thread(join)
        together(joined, formed, timeout)
        self._group = formed.result()

    def send(self, bucket: Bucket, post: Post) -> None:
        """Announce, and broadcast while the servers receive."""
        tensors = [self.ready(tensor) for _, tensor in bucket]
        received = post("/update_weights", [{"update_info": announcement(bucket)}])
        together(received, in_thread(lambda: self.broadcast(tensors)), None)

    def close(self) -> None:
        """Leave the group."""
        self._group = None


def announcement(bucket: Bucket) -> dict[str, Any]:
    """What is about to come, in vLLM's words.

    >>> import torch
    >>> announcement([("head", torch.zeros(2, 3))])
    {'names': ['head'], 'dtype_names': ['float32'], 'shapes': [[2, 3]]}
    """
    return {
        "names": [name for name, _ in bucket],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
    }


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
