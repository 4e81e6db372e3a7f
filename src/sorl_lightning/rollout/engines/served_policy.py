"""The copy of the policy that an engine generates with."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig, PreTrainedModel

from sorl_lightning.adapters import has_adapters
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.sharding import is_sharded


def eval_copy(policy: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """A copy of ``policy`` in eval mode, without gradients. The policy and the global generator are left alone.

    A sharded or not yet materialised policy, and one with adapters, whose weights come merged, is built again from its
    configuration; its weights have yet to come.

    Args:
        policy: any causal language model whose layers all attend to their whole past.
        dtype: type of the copy's parameters; None: that of the policy.

    Raises:
        ConfigurationError: a layer does not attend to its whole past.
    """
    check_attention(policy)
    elsewhere = is_sharded(policy) or policy.device.type == "meta" or has_adapters(policy)
    model = from_configuration(policy) if elsewhere else copy.deepcopy(policy)
    dtype = dtype or policy.dtype
    for parameter in model.parameters():
        # Parameters only: rotary frequencies are buffers, and would lose positions in half precision.
        parameter.data = parameter.data.to(dtype)
        parameter.grad = None
    if model.config._attn_implementation not in ("sdpa", "eager"):
        # Of the other kernels none takes a mask for each row.
        model.set_attn_implementation("sdpa")
    return model.requires_grad_(False).eval()


def from_configuration(policy: PreTrainedModel) -> PreTrainedModel:
    """A model of the policy's class and configuration, on the CPU, with weights of its own."""
    # fully_shard puts a class of its own before the model's.
    model_class: Any = next(c for c in type(policy).__mro__ if not issubclass(c, FSDPModule))
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        return model_class(copy.deepcopy(policy.config))


def check_attention(policy: PreTrainedModel) -> None:
    """Refuse a model whose state is more, or less, than one key and value for each past position.

    Raises:
        ConfigurationError: names the layer type.
    """
    config = policy.config.get_text_config()
    refused = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if not refused and not hasattr(config, "layer_types") and getattr(config, "sliding_window", None):
        refused = ["sliding_attention"]
    if not refused and getattr(policy, "_is_stateful", False):
        refused = ["recurrent state"]
    if not refused and getattr(config, "is_encoder_decoder", False):
        refused = ["cross_attention"]
    if refused:
        raise ConfigurationError(
            f"LocalEngine serves models with full attention only; {type(policy).__name__} has layers of type "
            f"{', '.join(refused)}. Choose a model (or a configuration of it) with full_attention in every layer"
        )


def context_limit(config: PreTrainedConfig) -> int | None:
    """Most positions that the model knows, tokens; None where it has no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def check_device(device: str) -> None:
    """Refuse a device that this machine has not.

    Raises:
        ConfigurationError: quotes torch.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigurationError(
            f"data.engine.device={device!r} cannot be used: {str(error).splitlines()[0]}"
        ) from error


@torch.no_grad()
def copy_weights(model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]], device: str | None = None) -> None:
    """Fill ``model`` tensor by tensor. Of names that share one tensor (tied weights) any is enough.

    Args:
        weights: names as in ``state_dict``, and whole (unsharded) tensors on any device and of any floating type.
        device: where the model moves before it is filled; None: where the first weight is.

    Raises:
        ValueError: a name that the model does not have, a shape that does not fit, or a name that never came.
    """
    targets: dict[str, Tensor] = {}
    filled = set()
    for name, weight in weights:
        if not targets:
            torch.nn.Module.to(model, device or weight.device)
            targets = model.state_dict()
        target = targets.get(name)
        if target is None:
            raise ValueError(f"the served {type(model).__name__} has no weight named {name!r}")
        if target.shape != weight.shape:
            raise ValueError(f"weight {name!r} must have shape {tuple(target.shape)}, got {tuple(weight.shape)}")
        target.copy_(weight)
        filled.add(target.data_ptr())
        del weight  # or it would live until the next one has been gathered: two whole tensors at a time
    targets = targets or model.state_dict()
    missing = [name for name, target in targets.items() if target.data_ptr() not in filled]
    if missing:
        raise ValueError(f"{len(missing)} of {len(targets)} weights did not come: {', '.join(missing[:5])}")
