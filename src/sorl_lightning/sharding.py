"""One plan for every network: fully shard each decoder layer, then what is left around them (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from sorl_lightning.adapters import adapter_parameters, plain_weights

Precision = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """How networks are sharded.

    Args:
        compute_dtype: type that layers compute in; None computes in that of the weights. Weights, gradients and
            optimiser keep their own.
        reduce_dtype: type in which gradients are averaged over ranks; None: that of the weights.
        activation_checkpointing: recompute activations of each decoder layer in the backward pass.
        cpu_offload: keep shards of weights, gradients and optimiser in the CPU's memory.
    """

    compute_dtype: Precision | None = None
    reduce_dtype: Precision | None = None
    activation_checkpointing: bool = False
    cpu_offload: bool = False

    def apply(self, network: nn.Module, mesh: DeviceMesh) -> None:
        """Shard ``network`` over the one-dimensional ``mesh``; one that is sharded already is left as it is."""
        if isinstance(network, FSDPModule):
            return
        if self.activation_checkpointing:
            checkpoint_activations(network)
        precision = MixedPrecisionPolicy(
            param_dtype=_dtype(self.compute_dtype), reduce_dtype=_dtype(self.reduce_dtype), cast_forward_inputs=False
        )
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if self.cpu_offload else OffloadPolicy()
        settings: dict[str, Any] = {"mesh": mesh, "mp_policy": precision, "offload_policy": offload}
        # Between passes all parameters must be shards: callbacks set gradients aside there, engines pull weights, and
        # frozen networks have no backward pass that would reshard them.
        for module in (*decoder_layers(network), network):
            fully_shard(module, reshard_after_forward=True, **settings)


def shard_layers(network: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the decoder layers of a frozen ``network`` over ``mesh``, each in its own dtype.

    Embeddings and output layer stay whole on every rank: they are read outside of a forward pass.
    """
    network.to(mesh.device_type)
    for layer in decoder_layers(network):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)


def decoder_layers(network: nn.Module) -> Sequence[nn.Module]:
    """The layers of a causal language model: the children of its largest ModuleList, the outermost of equals.

    Experts of a mixture are lists inside a layer, so they are smaller. Without a list there are no layers.
    """
    lists = [module for module in network.modules() if isinstance(module, nn.ModuleList)]
    sizes = [sum(parameter.numel() for parameter in layers.parameters()) for layers in lists]
    return list(lists[sizes.index(max(sizes))]) if lists else []


def checkpoint_activations(network: nn.Module) -> None:
    """Turn on the activation checkpointing of every Hugging Face model in ``network``."""
    for module in network.modules():
        enable = getattr(module, "gradient_checkpointing_enable", None)
        if enable is not None:
            enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            return


def is_sharded(network: nn.Module) -> bool:
    """Whether some of its parameters are in shards."""
    return any(isinstance(module, FSDPModule) for module in network.modules())


def full_weights(network: nn.Module, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Parameters by name, tied ones once, each gathered from its shards only when its turn comes.

    All ranks must read it to the end. Whoever drops a tensor before asking for the next has one whole one at a time.

    Args:
        network: with adapters or without.
        merged: whether adapters are added to the weights beside which they sit, or left out.
    """
    for name, parameter in plain_weights(network, merged):
        yield name, whole(parameter.detach())


def full_adapters(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The same of the adapters' own parameters."""
    for name, parameter in adapter_parameters(network):
        yield name, whole(parameter.detach())


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, gathered if it is in shards."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradient_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Global L2 norm, over all shards too."""
    return whole(torch.nn.utils.get_total_norm(list(gradients)))


def _dtype(name: Precision | None) -> Any:
    return None if name is None else getattr(torch, name)
