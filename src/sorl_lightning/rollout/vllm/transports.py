"""How a bucket of weights travels from the trainer into a vLLM server."""

from __future__ import annotations

import shutil
import tempfile
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from sorl_lightning.errors import ConfigurationError, EngineOutage
from sorl_lightning.interfaces import Interface

Bucket = list[tuple[str, Tensor]]
Post = Callable[[str, Sequence[dict[str, Any]]], Future[Any]]
"""Ask all servers the same route, each with a body of its own; the future fails with the first of them."""


class WeightTransport(Interface):
    """Carries buckets. Called from the training thread, between the start and the finish of an update."""

    @property
    @abstractmethod
    def backend(self) -> str:
        """The weight-transfer backend that the server must have been started with."""
        ...

    @abstractmethod
    def connect(self, post: Post, workers: Sequence[int], timeout: float) -> None:
        """Meet the servers, before the first update and again after a failed one.

        Args:
            post: to the servers.
            workers: of each server.
            timeout: seconds that one bucket may take.
        """
        ...

    @abstractmethod
    def send(self, bucket: Bucket, post: Post) -> None:
        """Have all servers load the bucket; returns when they have."""
        ...

    @abstractmethod
    def close(self) -> None:
        """Give back files and connections. Safe to call twice."""
        ...


class DiskTransport(WeightTransport):
    """A bucket is a safetensors file, written once and read by every server; it is gone when they have.

    Args:
        folder: where both sides find it; servers on other nodes need a shared one. None is a folder of its own in
            memory (/dev/shm) or, where there is none, among the temporary files.
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder
        self._place: Path | None = None

    @property
    def backend(self) -> str:
        """The plug-in's backend "disk"."""
        return "disk"

    def connect(self, post: Post, workers: Sequence[int], timeout: float) -> None:
        """Make the folder."""
        if self._place is None:
            memory = Path("/dev/shm")
            parent = self.folder or (str(memory) if memory.is_dir() else None)
            if self.folder is not None:
                Path(self.folder).mkdir(parents=True, exist_ok=True)
            self._place = Path(tempfile.mkdtemp(prefix="sorl-weights-", dir=parent))
        post("/init_weight_transfer_engine", [{"init_info": {}} for _ in workers]).result()

    def send(self, bucket: Bucket, post: Post) -> None:
        """Write, have it read, delete."""
        assert self._place is not None
        path = self._place / "bucket.safetensors"
        save_file({name: tensor.cpu().contiguous() for name, tensor in bucket}, path)
        try:
            post("/update_weights", [{"update_info": {"path": str(path)}}]).result()
        finally:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Delete the folder that was made here."""
        if self._place is not None:
            shutil.rmtree(self._place, ignore_errors=True)
        self._place = None


class GlooTransport(WeightTransport):
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


def buckets(weights: Iterable[tuple[str, Tensor]], size: int) -> Iterator[Bucket]:
    """Weights in order, ``size`` bytes at a time or one tensor where it is larger. A bucket is emptied once used.

    Only the tensors of one bucket are ever held.

    >>> [[name for name, _ in bucket] for bucket in buckets([("a", torch.zeros(2)), ("b", torch.zeros(3))], size=16)]
    [['a'], ['b']]
    """
    bucket: Bucket = []
    held = 0
    for name, tensor in weights:
        length = tensor.numel() * tensor.element_size()
        if bucket and held + length > size:
            yield bucket
            bucket.clear()
            held = 0
        bucket.append((name, tensor))
        held += length
        del tensor
    if bucket:
        yield bucket
        bucket.clear()


def check_backend(transport: WeightTransport, backend: str | None, url: str) -> None:
    """Refuse a server that takes weights in another way, or in none."""
    if backend != transport.backend:
        raise ConfigurationError(
            f"{url} takes weights by {backend!r} and VLLMEngine.transport sends them by {transport.backend!r}: start "
            f'it with --weight-transfer-config \'{{"backend": "{transport.backend}"}}\' and --worker-extension-cls '
            "sorl_lightning.vllm_plugin.weight_transfer.WorkerExtension"
        )
