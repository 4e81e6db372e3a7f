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


def probe_width(model: PreTrainedModel) -> int:
    """Tokens that a model is tried on when it is loaded: few, and no more than it has positions."""
    return min(24, getattr(model.config.get_text_config(), "max_position_embeddings", None) or 24)


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
    config, width = model.config.get_text_config(), probe_width(model)
    half = max(1, width // 2)
    places = torch.arange(width, device=model.device)[None]

    def first_half(end: int) -> Tensor:
        """Its hidden states where it is followed by others up to ``end``."""
        output = model.base_model(
            input_ids=places[:, :end] % config.vocab_size, position_ids=places[:, :end], use_cache=False
        )
        if getattr(output, "last_hidden_state", None) is None:
            raise ConfigurationError(
                f"{type(model).__name__} does not show its last hidden states, which log-probabilities are made of: "
                f"its base model is a {type(model.base_model).__name__}; choose another model"
            )
        states: Tensor = output.last_hidden_state
        return states[:, :half].float()

    try:
        with draws_nothing(model):
            whole, alone = first_half(width), first_half(half)
    except ConfigurationError:
        raise
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return  # a kernel that is for a GPU, say
    if whole.isfinite().all() and not alike(whole, alone):
        raise ConfigurationError(
            f"{type(model).__name__} computes a token otherwise where others follow it, and a policy must give each "
            "token the probability that it was sampled with; choose a causal language model"
        )
