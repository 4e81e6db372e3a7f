"""Weight-transfer backends for vLLM's own weight-update routes: "disk" and "gloo".

A worker imports this module because ``--worker-extension-cls`` names a class of it; importing registers the backends.
Weights arrive bucket by bucket, each an update of its own between one start and one finish.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

import sorl_lightning.vllm_plugin.adapters  # noqa: F401  # for what it does to vLLM


class BucketEngine(WeightTransferEngine):
    """Loads buckets into the model, layer by layer as they become complete."""

    def start_weight_update(self) -> None:
        """Expect all weights anew. What an update that failed half-way has left behind is dropped first."""
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = 0
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket. (The base class synchronizes an accelerator, which a CPU does not have.)"""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        """Put the last layers in place."""
        finalize_layerwise_reload(self.model, self.model_config)
        refresh_tied_heads(self.model)

    def shutdown(self) -> None:
        """Nothing is held."""


def refresh_tied_heads(model: torch.nn.Module) -> None:
    """Pack the weights of tied output heads again.

    On CPUs vLLM computes logits from a packed copy, ``cpu_linear``, of a head that is tied to the embedding, and a
    layerwise reload updates the embedding alone: the logits would stay those of the old weights.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


@dataclass
class DiskInit(WeightTransferInitInfo):
    """Nothing is agreed on beforehand."""


@dataclass
class DiskUpdate(WeightTransferUpdateInfo):
    """One bucket.

    Attributes:
        path: its safetensors file, on a disk that trainer and server share.
    """

    path: str


class DiskEngine(BucketEngine):
    """Backend "disk": a bucket is a safetensors file."""

    init_info_cls = DiskInit
    update_info_cls = DiskUpdate

    def init_transfer_engine(self, init_info: DiskInit) -> None:
        """There is no connection to make."""

    def receive_weights(self, update_info: DiskUpdate) -> None:
        """Read the whole file before the model sees a tensor: a file that cannot be read changes nothing."""
        self.model.load_weights(read(Path(update_info.path)))


def read(path: Path) -> Iterable[tuple[str, Tensor]]:
    """All tensors of a safetensors file.

    Raises:
        FileNotFoundError: the file is not there.
    """
    if not path.is_file():
        raise FileNotFoundError(f"weight bucket {path} is not there: do trainer and server share this folder?")
    with safe_open(path, framework="pt") as file:
        return [(name, file.get_tensor(name)) for name in file.keys()]  # noqa: SIM118


@dataclass
class GlooInit(WeightTransferInitInfo):
    """Where the trainer, rank 0 of the group, waits.

    Attributes:
        host: address of the trainer.
        port: of its store.
        world_size: the trainer and all workers of all servers.
        rank_offset: rank of this server's first worker.
        timeout: seconds after which a broadcast has failed.
    """

    host: str
    port: int
    world_size: int
    rank_offset: int
    timeout: float


@dataclass
class GlooUpdate(WeightTransferUpdateInfo):
    """The tensors of one bucket, in the order of their broadcasts.

    Attributes:
        names: as in the trainer's state dict.
        dtype_names: of torch types.
        shapes: whole shapes, unsharded.
    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooEngine(BucketEngine):
    """Backend "gloo": the trainer broadcasts every tensor to all workers."""

    init_info_cls = GlooInit
    update_info_cls = GlooUpdate
    group: Any = None

    def init_transfer_engine(self, init_info: GlooInit) -> None:
        """Join the trainer's group; a second call leaves the first group for a new one."""
        timeout = timedelta(seconds=init_info.timeout)
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        store = dist.TCPStore(init_info.host, init_info.port, init_info.world_size, False, timeout)
        self.group = dist.ProcessGroupGloo(store, rank, init_info.world_size, timeout)

    def receive_weights(self, update_info: GlooUpdate) -> None:
        """Receive the whole bucket before the model sees a tensor: a broken broadcast changes nothing."""
        if self.group is None:
            raise RuntimeError("gloo weight transfer is not initialised: call /init_weight_transfer_engine first")
        self.model.load_weights(list(self.tensors(update_info)))

    def tensors(self, update: GlooUpdate) -> Iterator[tuple[str, Tensor]]:
        """Each tensor as it arrives."""
        for name, dtype, shape in zip(update.names, update.dtype_names, update.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
            self.group.broadcast([tensor], dist.BroadcastOptions()).wait()
            yield name, tensor

    def shutdown(self) -> None:
        """Leave the group."""
        self.group = None


for name, engine in (("disk", DiskEngine), ("gloo", GlooEngine)):
    if name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(name, engine)


class WorkerExtension:
    """Mixed into vLLM's workers; that they import this module is all that is asked of it."""
