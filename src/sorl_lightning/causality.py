"""Whether a model in training gives a token the same, whatever follows it and however often it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sorl_lightning.errors import ConfigurationError


def alike(states: Tensor, others: Tensor) -> bool:
    """Whether hidden states are the same but for rounding, in bfloat16 too."""
    return torch.allclose(states, others, rtol=1e-2, atol=1e-2 * float(others.abs().max()))


@contextmanager
def draws_nothing(model: PreTrainedModel) -> Iterator[None]:
    """Refuse a model that draws random numbers while it computes in here, as routers of some mixtures of experts do.

    Raises:
        ConfigurationError: the state of its device's generator has changed.
    """
    device = model.device
    on_cpu = device.type == "cpu"
    state = torch.get_rng_state if on_cpu else partial(torch.get_device_module(device).get_rng_state, device)
    before = state()
    yield
    if not torch.equal(before, state()):
        raise ConfigurationError(
            f"{type(model).__name__} draws random numbers in training, and a policy must give each token the "
            "probability that it was sampled with; set what draws them (a jitter of the router, say) to 0 in its "
            "configuration, or choose another model"
        )


@torch.no_grad()
def check_causal(model: PreTrainedModel) -> None:
    """Refuse a model in which a token sees what follows it, be it padding. What cannot run here is not asked.

    Raises:
        ConfigurationError: it does, or it draws random numbers.
    """
    config, device = model.config.get_text_config(), model.device
    width = min(24, getattr(config, "max_position_embeddings", None) or 24)
    ids, positions = (
        torch.arange(width, device=device)[None] % config.vocab_size,
        torch.arange(width, device=device)[None],
    )
    size = max(1, width // 2)
    try:
        with draws_nothing(model):
            whole, alone = (
                model.base_model(input_ids=ids[:, :end], position_ids=positions[:, :end], use_cache=False)
                .last_hidden_state[:, :size]
                .float()
                for end in (width, size)
            )
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, ConfigurationError):
            raise
        return  # a kernel that is for a GPU, say
    if whole.isfinite().all() and not alike(whole, alone):
        raise ConfigurationError(
            f"{type(model).__name__} computes a token otherwise where others follow it, and a policy must give each "
            "token the probability that it was sampled with; choose a causal language model"
        )
