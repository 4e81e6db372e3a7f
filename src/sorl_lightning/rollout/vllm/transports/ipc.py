"""Weights that a server on the same GPU reads where they are, by vLLM's own "ipc" backend."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.vllm.transports.broadcast import announcement
from sorl_lightning.rollout.vllm.transports.buckets import Bucket, BucketTransport, start
from sorl_lightning.rollout.vllm.transports.nccl import own_gpu
from sorl_lightning.rollout.vllm.transports.transport import Post


class IPCTransport(BucketTransport):
    """A server that shares the trainer's GPU opens the trainer's memory.

    vLLM keeps what it has opened until a layer is complete, so all weights are held until it has them all: unsharded,
    and in the servers' type, they are the policy's own memory, and nothing is copied. The servers need no plug-in, but
    VLLM_ALLOW_INSECURE_SERIALIZATION=1 in their environment, as handles are pickled. Not run on a GPU; what goes over
    HTTP is checked against vLLM's own types.
    """

    @property
    def backend(self) -> str:
        """VLLM's own backend "ipc"."""
        return "ipc"

    def connect(self, post: Post, workers: Sequence[int], timeout: float) -> None:
        """Say how handles will come.

        Raises:
            ConfigurationError: this process has no GPU, or a server has several.
        """
        own_gpu("IPCTransport")
        if max(workers) > 1:
            raise ConfigurationError(
                f"VLLMEngine.transport=IPCTransport needs servers of one worker, on the trainer's GPU, and they have "
                f"{list(workers)}: use NCCLTransport"
            )
        post("/init_weight_transfer_engine", [{"init_info": {"packed": False}}]).result()

    def deliver(self, weights: Iterable[tuple[str, Tensor]], name: str, post: Post, bucket_bytes: int) -> None:
        """All at once, held until the servers have them in place."""
        device = own_gpu("IPCTransport")
        held = [(key, tensor.detach().to(device).contiguous()) for key, tensor in weights]
        torch.cuda.synchronize(device)
        start(post)
        self.send(held, post)
        post("/finish_weight_update", [{"weight_version": name}]).result()

    def send(self, bucket: Bucket, post: Post) -> None:
        """Names, shapes and handles."""
        gpu = str(torch.cuda.get_device_properties(bucket[0][1].device).uuid)
        handles = [{gpu: reduce_tensor(tensor)[1]} for _, tensor in bucket]
        post("/update_weights", [{"update_info": with_handles(bucket, handles)}]).result()

    def close(self) -> None:
        """Nothing is held."""


def with_handles(bucket: Bucket, handles: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The announcement of tensors whose handles come with it; each handle by the GPU that it is of."""
    return {**announcement(bucket), "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode()}
