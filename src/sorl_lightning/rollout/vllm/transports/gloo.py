"""Weights broadcast over TCP, from memory to memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from sorl_lightning.rollout.vllm.transports.broadcast import BroadcastTransport


class GlooTransport(BroadcastTransport):
    """Tensors are broadcast from memory to memory, over TCP, one by one.

    Args:
        host: address under which the servers reach the trainer.
        port: of the meeting point; 0 takes a free one.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.host = host
        self.port = port

    @property
    def backend(self) -> str:
        """The plug-in's backend "gloo"."""
        return "gloo"

    def meet(self, world: int, timeout: float) -> tuple[dict[str, Any], Callable[[], Any]]:
        """A store of this process's own."""
        limit = timedelta(seconds=timeout)
        store = dist.TCPStore(self.host, self.port, world, is_master=True, timeout=limit, wait_for_workers=False)
        meeting = {"host": self.host, "port": store.port, "timeout": timeout}
        return meeting, lambda: dist.ProcessGroupGloo(store, 0, world, limit)

    def ready(self, tensor: Tensor) -> Tensor:
        """In this process's memory."""
        return tensor.cpu().contiguous()

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Over TCP."""
        for tensor in tensors:
            self._group.broadcast([tensor], dist.BroadcastOptions()).wait()
