"""Weights broadcast from GPU to GPUs, to vLLM's own "nccl" backend."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.cuda import nccl

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.vllm.transports.broadcast import BroadcastTransport


class NCCLTransport(BroadcastTransport):
    """Tensors are broadcast from the trainer's GPU to those of all workers, one by one.

    The servers need no plug-in: vLLM's own backend receives. Not run on a GPU; what goes over HTTP is checked against
    vLLM's own types.
    """

    _device: torch.device | None = None

    @property
    def backend(self) -> str:
        """VLLM's own backend "nccl"."""
        return "nccl"

    def meet(self, world: int, timeout: float) -> tuple[dict[str, Any], Callable[[], Any]]:
        """An id of NCCL's, which travels over HTTP.

        Raises:
            ConfigurationError: this process has no GPU.
        """
        device = self._device = own_gpu("NCCLTransport")
        unique_id = nccl.unique_id()

        def join() -> Any:
            with torch.cuda.device(device):  # a thread begins with the first
                communicator = nccl.init_rank(world, unique_id, 0)
                # vLLM's workers warm theirs up so, and would wait for this one.
                nccl.all_reduce([torch.zeros(1, device=device)], comms=[communicator])
                torch.cuda.synchronize(device)
            return communicator

        return {"nccl_unique_id_b64": base64.b64encode(unique_id).decode(), "packed": False}, join

    def ready(self, tensor: Tensor) -> Tensor:
        """On this process's GPU, all of it written."""
        tensor = tensor.to(self._device).contiguous()
        torch.cuda.current_stream(self._device).synchronize()  # the broadcast is on a stream of another thread
        return tensor

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """From GPU to GPUs."""
        with torch.cuda.device(self._device):
            for tensor in tensors:
                nccl.broadcast([tensor], comms=[self._group])
            torch.cuda.synchronize(self._device)


def own_gpu(transport: str) -> torch.device:
    """The GPU of this process.

    Raises:
        ConfigurationError: it has none.
    """
    if not torch.cuda.is_available():
        raise ConfigurationError(
            f"VLLMEngine.transport={transport} sends weights from a GPU and the trainer has none: use DiskTransport or "
            "GlooTransport"
        )
    return torch.device("cuda", torch.cuda.current_device())
