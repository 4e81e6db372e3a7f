"""Models that carry peft's adapters: which they are, and their weights as everyone else knows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from sorl_lightning.errors import ConfigurationError

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of peft's own wrapper, in the names of saved weights


def has_adapters(model: nn.Module) -> bool:
    """Whether peft's adapters sit in the model."""
    return hasattr(model, "peft_config")


def adapter_rank(model: nn.Module) -> int:
    """Rank of the model's adapters.

    Raises:
        ConfigurationError: it has none.
    """
    if not has_adapters(model):
        raise ConfigurationError(
            "AdapterTransport carries adapters and the policy has none: take the source sorl_lightning.lora.LoRA, or "
            "another VLLMEngine.transport"
        )
    return int(model.peft_config["default"].r)  # type: ignore[union-attr,index]


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The adapters' own parameters, by name."""
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            yield name, parameter


def save_adapters(model: PreTrainedModel, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write the adapters as peft does, for ``PeftModel.from_pretrained`` and for vLLM.

    Args:
        model: that they sit in.
        folder: made where it is missing.
        weights: of ``adapter_parameters``, gathered; None: the model's own.
    """
    from peft import get_peft_model_state_dict

    folder.mkdir(parents=True, exist_ok=True)
    model.peft_config["default"].save_pretrained(str(folder))
    weights = get_peft_model_state_dict(model, weights, save_embedding_layers=False)
    save_file({f"{PREFIX}{name}": weight.contiguous() for name, weight in weights.items()}, folder / WEIGHTS)


@torch.no_grad()
def plain_weights(model: nn.Module, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Parameters under the names of the model without adapters, these merged into the weights that they change.

    Args:
        model: with adapters or without.
        merged: whether adapters count; False gives the weights beside which they sit.
    """
    if not has_adapters(model):
        yield from model.named_parameters()
        return
    from peft.tuners.lora import LoraLayer

    adapted: dict[str, Any] = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    for name, parameter in model.named_parameters():
        owner, base, rest = name.partition(".base_layer.")
        if base and rest == "weight" and merged:
            layer = adapted[owner]
            delta = sum(layer.get_delta_weight(adapter) for adapter in layer.active_adapters)
            yield f"{owner}.{rest}", parameter + delta
        elif base:
            yield f"{owner}.{rest}", parameter
        elif not any(name.startswith(f"{layer}.") for layer in adapted):
            yield name, parameter
