"""Rows without their padding, joined to one line in which none sees another, and what they open with computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sorl_lightning.causality import alike, check_causal, draws_nothing, probe_width
from sorl_lightning.functional.lines import Line, Piece, line_of, shortest_on
from sorl_lightning.functional.turns import fill, row_lengths

ATTENTION = "sorl_padding_free"
# Layers whose state is the past keys and values alone; of any other kind a row would leave something to the next.
ATTENDING = {"full_attention", "sliding_attention"}
SPARED_BY_A_MASK = 8192  # pairs of tokens below which no mask is made


@dataclass(frozen=True, kw_only=True)
class TokenStates:
    """What a backbone made of N tokens of rows, of which it saw M: openings that rows share, once.

    Attributes:
        hidden: last hidden states of the M tokens.
        kept: where the N tokens are in the rows.
        place: which of the M each of the N tokens is, in row-major order.
    """

    hidden: Float[Tensor, "M D"]
    kept: Bool[Tensor, "B T"]
    place: Int[Tensor, "N"]

    def before(self, generated: Bool[Tensor, "B T"]) -> Float[Tensor, "G D"]:
        """The states that predict the generated tokens, none of which opens its row."""
        return self.hidden.index_select(0, self.place[generated.roll(-1, dims=1)[self.kept]])

    def spread(self, values: Float[Tensor, "M"]) -> Float[Tensor, "B T"]:
        """A number for each token as rows, 0 where nothing was kept."""
        return fill(self.kept, values[self.place])


def token_states(
    backbone: nn.Module, input_ids: Tensor, position_ids: Tensor, generated: Bool[Tensor, "B T"]
) -> TokenStates:
    """Hidden states of rows [B, T] that are padded on the right, up to each row's last generated token at least.

    Where ``make_padding_free`` found that the backbone can do without it, padding is never computed, and a prompt that
    several rows open with is computed once.
    """
    assert isinstance(backbone, PreTrainedModel)
    if not is_padding_free(backbone):
        # Causal attention needs no mask: what is on the right is not seen.
        states = _run(backbone, input_ids, position_ids)
        place = torch.arange(generated.numel(), device=generated.device)
        return TokenStates(hidden=states.flatten(0, 1), kept=torch.ones_like(generated), place=place)
    line = line_of(input_ids, row_lengths(generated).clamp(min=1), shared_from(backbone, input_ids.device))
    return _states_of(backbone, input_ids, position_ids, line)


def make_padding_free(model: PreTrainedModel) -> PreTrainedModel:
    """``model``, prepared to compute joined rows instead of padded ones wherever that gives the same.

    Scaled dot-product attention is exchanged for one that takes row by row, after a comparison on a few tokens; the
    variable-length kernels of flash attention find the rows by their positions. With any other attention, or with
    layers that keep a state besides keys and values, rows stay padded.

    Raises:
        ConfigurationError: a token's state is not a function of the tokens up to it.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    attends = kinds <= ATTENDING and not getattr(model, "_is_stateful", False)
    joins = attends and config._attn_implementation == "sdpa"
    if joins:
        model.set_attn_implementation(ATTENTION)
    if model.device.type != "meta":
        with draws_nothing(model):
            apart = not joins or _rows_are_apart(model.base_model)
        if not apart:
            model.set_attn_implementation("sdpa")
        if not is_padding_free(model):
            check_causal(model)
    return model


def is_padding_free(model: PreTrainedModel) -> bool:
    """Whether ``token_states`` leaves padding out."""
    attention = str(model.config.get_text_config()._attn_implementation)
    return attention == ATTENTION or attention.startswith("flash_attention")


def shared_from(model: PreTrainedModel, device: torch.device) -> int | None:
    """Fewest tokens that several rows open with and that ``token_states`` computes once; None: it never does."""
    return shortest_on(device) if _takes_pieces(model) else None


def _run(backbone: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, **settings: Any) -> Tensor:
    states: Tensor = backbone(
        input_ids=input_ids, position_ids=position_ids, use_cache=False, **settings
    ).last_hidden_state
    return states


def _states_of(backbone: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, line: Line) -> TokenStates:
    """Hidden states of rows [B, T] that are laid as ``line``."""
    ids, positions = (tokens.flatten()[line.source][None] for tokens in (input_ids, position_ids))
    # A mask of four dimensions is passed on as it is, so none of [M, M] is made. Keywords reach every attention layer,
    # and again when activations are recomputed.
    joined = {"attention_mask": ids.new_empty(1, 1, 1, 0), "joined": line.pieces} if _takes_pieces(backbone) else {}
    states = _run(backbone, ids, positions, **joined)
    return TokenStates(hidden=states[0], kept=line.kept, place=line.place)


def _takes_pieces(model: PreTrainedModel) -> bool:
    return bool(model.config.get_text_config()._attn_implementation == ATTENTION)


@torch.no_grad()
def _rows_are_apart(backbone: nn.Module) -> bool:
    """Whether rows give the same joined as alone; not so where a layer drops the keyword, or mixes tokens otherwise."""
    assert isinstance(backbone, PreTrainedModel)
    width = probe_width(backbone)
    if width < 6:
        return False
    ids = torch.arange(width).repeat(3, 1) % backbone.config.get_text_config().vocab_size
    ids[1, width - 4 :] = ids[2] = 0  # two rows that part near their ends, and another
    line = line_of(ids, torch.tensor([width, width - 2, 5]), shortest=1)
    ids = ids.to(backbone.device)
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    try:
        joined = _states_of(backbone, ids, positions, line)
    except (TypeError, ValueError, RuntimeError):
        return False
    alone = _run(backbone, ids, positions)[joined.kept].float()
    together = joined.hidden[joined.place].float()
    return alike(together, alone)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    joined: Sequence[Piece] | None = None,
    sliding_window: int | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention; of joined rows, each piece by itself and after its opening.

    Args:
        query: float [1, H, M, E]; key and value: float [1, G, M, E].
        attention_mask: as transformers makes it, of rows that are not joined.
        joined: the pieces that the tokens are; None: they are rows that are not joined.
        sliding_window: tokens that each token sees, itself among them; None: all before it.
    """
    if joined is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    sizes = [piece.size for piece in joined]
    parts = list(zip(*(states.split(sizes, dim=2) for states in (query, key, value)), strict=True))
    rows: list[Sequence[Tensor]] = []  # whole ones, up to the end of each piece
    outputs = []
    for (size, opening), part in zip(joined, parts, strict=True):
        rows.append(part if opening is None else _after(rows[opening], part))
        queries, keys, values = rows[-1]
        # A mask costs kernels and all pairs of tokens, and spares the opening's own queries: worth it for many of them.
        length = keys.shape[2]
        queries = part[0] if 2 * size < length and (length - size) * length > SPARED_BY_A_MASK else queries
        mask = _mask(queries, keys, sliding_window)
        outputs.append(sdpa_attention_forward(module, queries, keys, values, mask, **settings)[0][:, -size:])
    return torch.cat(outputs, dim=1), None


def _after(opening: Sequence[Tensor], piece: Sequence[Tensor]) -> Sequence[Tensor]:
    """Queries, keys and values of both."""
    return [torch.cat(states, dim=2) for states in zip(opening, piece, strict=True)]


def _mask(query: Tensor, key: Tensor, window: int | None) -> Tensor | None:
    """What queries, the last of a row, see of its keys; None: every key up to their own."""
    size, length = query.shape[2], key.shape[2]
    before = length - size
    if before == 0 and (window is None or length <= window):
        return None
    mask = torch.ones(size, length, dtype=torch.bool, device=query.device).tril(before)
    return (mask if window is None else mask.triu(before + 1 - window))[None, None]


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
