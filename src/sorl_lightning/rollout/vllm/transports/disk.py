"""Weights as files that both sides can see."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file

from sorl_lightning.rollout.vllm.transports.buckets import Bucket, BucketTransport
from sorl_lightning.rollout.vllm.transports.transport import Post


class DiskTransport(BucketTransport):
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
            self._place = own_folder(self.folder)
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


def own_folder(parent: str | None) -> Path:
    """A new folder in ``parent``, which is made where it is missing; None: in memory, if it can be.

    Its name holds the process id, by which a server that has lost this process finds it.
    """
    if parent is not None:
        Path(parent).mkdir(parents=True, exist_ok=True)
    elif Path("/dev/shm").is_dir():
        parent = "/dev/shm"
    return Path(tempfile.mkdtemp(prefix=f"sorl-weights-{os.getpid()}-", dir=parent))
