"""Rows without their padding: joined to one long row, in which none sees another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sorl_lightning.functional.turns import fill, row_lengths

ATTENTION = "sorl_padding_free"
# Layers whose state is the past keys and values alone; of any other kind a row would leave something to the next.
ATTENDING = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, kw_only=True)
class TokenStates:
    """What a backbone made of the N tokens of rows that it saw.

    Attributes:
        hidden: their last hidden states.
        kept: where those tokens are in the rows.
    """

    hidden: Float[Tensor, "N D"]
    kept: Bool[Tensor, "B T"]

    def before(self, generated: Bool[Tensor, "B T"]) -> Float[Tensor, "G D"]:
        """The states that predict the generated tokens, none of which opens its row."""
        return self.hidden[generated.roll(-1, dims=1)[self.kept]]

    def spread(self, values: Float[Tensor, "N"]) -> Float[Tensor, "B T"]:
        """A number for each token as rows, 0 where nothing was kept."""
        return fill(self.kept, values)


def token_states(
    backbone: nn.Module, input_ids: Tensor, position_ids: Tensor, generated: Bool[Tensor, "B T"]
) -> TokenStates:
    """Hidden states of rows [B, T] that are padded on the right, up to each row's last generated token at least.

    Padding is never computed where ``make_padding_free`` found that the backbone can do without it.
    """
    assert isinstance(backbone, PreTrainedModel)
    if not is_padding_free(backbone):
        # Causal attention needs no mask: what is on the right is not seen.
        states = _run(backbone, input_ids, position_ids)
        return TokenStates(hidden=states.flatten(0, 1), kept=torch.ones_like(generated))
    lengths = row_lengths(generated).clamp(min=1)
    kept = torch.arange(generated.shape[1], device=generated.device) < lengths[:, None]
    states = _joined_states(backbone, input_ids[kept][None], position_ids[kept][None], tuple(lengths.tolist()))
    return TokenStates(hidden=states[0], kept=kept)


def make_padding_free(model: PreTrainedModel) -> PreTrainedModel:
    """``model``, prepared to compute joined rows instead of padded ones wherever that gives the same.

    Scaled dot-product attention is exchanged for one that takes row by row, after a comparison on a few tokens; the
    variable-length kernels of flash attention find the rows by their positions. With any other attention, or with
    layers that keep a state besides keys and values, rows stay padded.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    attends = kinds <= ATTENDING and not getattr(model, "_is_stateful", False)
    if attends and config._attn_implementation == "sdpa":
        model.set_attn_implementation(ATTENTION)
        if model.device.type != "meta" and not _rows_are_apart(model.base_model):
            model.set_attn_implementation("sdpa")
    return model


def is_padding_free(model: PreTrainedModel) -> bool:
    """Whether ``token_states`` leaves padding out."""
    attention = str(model.config.get_text_config()._attn_implementation)
    return attention == ATTENTION or attention.startswith("flash_attention")


def _run(backbone: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, **settings: Any) -> Tensor:
    states: Tensor = backbone(
        input_ids=input_ids, position_ids=position_ids, use_cache=False, **settings
    ).last_hidden_state
    return states


def _joined_states(
    backbone: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, lengths: tuple[int, ...]
) -> Tensor:
    if backbone.config.get_text_config()._attn_implementation != ATTENTION:
        return _run(backbone, input_ids, position_ids)
    # A mask of four dimensions is passed on as it is, so none of [N, N] is made. Keywords reach every attention layer,
    # and again when activations are recomputed.
    mask = input_ids.new_empty(1, 1, 1, 0)
    return _run(backbone, input_ids, position_ids, attention_mask=mask, joined=lengths)


@torch.no_grad()
def _rows_are_apart(backbone: nn.Module) -> bool:
    """Whether rows give the same joined as alone; not so where a layer drops the keyword, or mixes tokens otherwise."""
    assert isinstance(backbone, PreTrainedModel)
    lengths = (5, 3)
    ids = torch.arange(sum(lengths), device=backbone.device)[None] % backbone.config.get_text_config().vocab_size
    positions = torch.cat([torch.arange(length, device=ids.device) for length in lengths])[None]
    try:
        joined = _joined_states(backbone, ids, positions, lengths)
    except (TypeError, ValueError, RuntimeError):
        return False
    rows = zip(ids.split(lengths, dim=1), positions.split(lengths, dim=1), strict=True)
    alone = torch.cat([_run(backbone, *row) for row in rows], dim=1)
    return torch.allclose(joined.float(), alone.float(), rtol=1e-2, atol=1e-2 * float(alone.abs().max()))


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    joined: Sequence[int] | None = None,
    sliding_window: int | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention; of joined rows, each by itself.

    Args:
        query: float [1, H, N, E]; key and value: float [1, G, N, E].
        attention_mask: as transformers makes it, of rows that are not joined.
        joined: length of each row; None: they are not joined.
        sliding_window: tokens that each token sees, itself among them; None: all before it.
    """
    if joined is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    rows = zip(*(states.split(joined, dim=2) for states in (query, key, value)), strict=True)
    outputs = [sdpa_attention_forward(module, q, k, v, _window(q, sliding_window), **settings)[0] for q, k, v in rows]
    return torch.cat(outputs, dim=1), None


def _window(query: Tensor, size: int | None) -> Tensor | None:
    """Which of a row's tokens each of them sees; None: all before it."""
    length = query.shape[2]
    if size is None or length <= size:
        return None
    band = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    return band.triu(1 - size)[None, None]


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
