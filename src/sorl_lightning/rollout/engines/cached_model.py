"""A model whose keys and values are kept from turn to turn, in a row for each trajectory."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Collection, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from sorl_lightning.rollout.engine import GenerationRequest, TrajectoryKey
from sorl_lightning.rollout.engines.kv_cache import RowCache, Rows
from sorl_lightning.rollout.engines.open_turn import OpenTurn, TokenBatch, common_prefix, group_by_length

# Tokens of one forward pass over prompts, padding included: bounds the memory of activations and of the mask.
CPU_PROMPT_TOKENS = 2048
GPU_PROMPT_TOKENS = 16384


class CachedModel:
    """Forward passes over rows of a cache that outlives the turn.

    Of each prompt only the tokens after the longest prefix that is already cached are forwarded, and a fresh prompt
    that several trajectories share only once.

    Args:
        model: the served model.

    Attributes:
        lock: held by whoever decodes or changes the model's weights, which may be two threads.
        version: of the model's weights; None: there are none.
        seats: whose each row is.
        cached_ids: of each trajectory that has a row, the tokens whose keys and values are in it.
        forwarded_tokens: tokens that went through the model so far, padding not counted.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.lock = threading.RLock()
        self.version: int | None = None
        self.forwarded_tokens = 0
        self._stopped = False
        # transformers renamed the argument; both names are in use among the versions supported.
        known = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in known else "past_key_values"
        self._cache = RowCache()
        self.clear()

    def clear(self) -> None:
        """Forget every key and value, but not how long sequences became: the next cache need not grow again."""
        with self.lock:
            self._cache = RowCache(self._cache.slots)
            self.seats: list[TrajectoryKey] = []
            self.cached_ids: dict[TrajectoryKey, tuple[int, ...]] = {}

    def stop(self) -> None:
        """Compute no more: the next forward pass raises, whatever thread is at it."""
        self._stopped = True

    def arrange(self, order: Sequence[TrajectoryKey], rows: int = 0) -> None:
        """Seat trajectories as ``order`` says, and forget those that it leaves out.

        What ``cached_ids`` says of the trajectories that move must be true.

        Args:
            order: whose each row is to be.
            rows: to make room for, where more trajectories than these are expected.
        """
        row_of = {key: row for row, key in enumerate(self.seats)}
        moved = {row: row_of[key] for row, key in enumerate(order) if row_of.get(key, row) != row}
        length = max((len(self.cached_ids[order[row]]) for row in moved), default=0)
        self._cache.reserve(max(rows, len(order)), 0)
        self._cache.copy_rows(list(moved.values()), list(moved), length)
        for gone in row_of.keys() - set(order):
            self.cached_ids.pop(gone, None)
        self.seats = list(order)

    def start(self, request: GenerationRequest) -> OpenTurn:
        """The turn that ``request`` asks for, whose trajectory has a row."""
        cached = common_prefix(self.cached_ids.get(request.trajectory, ()), request.prompt_ids)
        # The last token is forwarded in any case: its logits start the turn.
        return OpenTurn(request, min(cached, len(request.prompt_ids) - 1))

    def read_prompts(self, turns: Mapping[int, OpenTurn]) -> Float[Tensor, "B V"]:
        """Logits after the prompt of each turn, by row. What siblings open with is forwarded once, and copied."""
        leaders: dict[tuple[int, ...], int] = {}
        leader = {
            row: row if turn.cached else leaders.setdefault(turn.request.prompt_ids, row) for row, turn in turns.items()
        }
        followers = [row for row in turns if leader[row] != row]
        lengths = {row: len(turns[row].new_ids) for row in turns if leader[row] == row}
        budget = CPU_PROMPT_TOKENS if self.model.device.type == "cpu" else GPU_PROMPT_TOKENS
        groups = list(group_by_length(lengths, budget))
        logits = torch.cat(
            [self._forward(TokenBatch.of_prompts([turns[row] for row in group], group)) for group in groups]
        )
        length = max((len(turns[row].request.prompt_ids) for row in followers), default=0)
        self._cache.copy_rows([leader[row] for row in followers], followers, length)
        self.forwarded_tokens += sum(lengths.values())
        place = {row: i for i, row in enumerate(row for group in groups for row in group)}
        return logits[[place[leader[row]] for row in turns]]

    def read_last_tokens(self, turns: Mapping[int, OpenTurn]) -> Float[Tensor, "B V"]:
        """Logits after the last token of each turn, by row. A finished one among them is none that counts."""
        self.forwarded_tokens += sum(turn.finish_reason is None for turn in turns.values())
        return self._forward(TokenBatch.of_last_tokens(list(turns.values()), list(turns)))

    def _forward(self, batch: TokenBatch) -> Float[Tensor, "B V"]:
        """Logits after the last token of each row."""
        if self._stopped:
            raise RuntimeError("LocalEngine was closed while a turn was decoded")
        device = self.model.device
        length = max(positions[-1] for positions in batch.positions) + 1
        positions = torch.tensor(batch.positions, device=device)
        slots = positions
        self._cache.reserve(0, length)
        if any(batch.padding):
            # Padding sees position 0, and writes where nobody looks.
            column = torch.arange(positions.shape[1], device=device)
            padding = column < torch.tensor(batch.padding, device=device)[:, None]
            slots = positions.masked_fill(padding, self._cache.padding_slot)
        self._cache.aim(Rows.of(batch.rows, device), slots, length)
        visible = torch.arange(length, device=device) <= positions[:, None, :, None]
        output = self.model(
            input_ids=torch.tensor(batch.ids, device=device),
            attention_mask=torch.where(visible, torch.zeros((), dtype=self.model.dtype, device=device), -torch.inf),
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: self._cache},
        )
        return output.logits[:, -1]


def in_front(seats: Sequence[TrajectoryKey], chosen: Collection[TrajectoryKey]) -> list[TrajectoryKey]:
    """``seats`` with those of ``chosen`` first, by as few swaps as will do."""
    order = list(seats)
    count = sum(key in chosen for key in seats)
    left = [row for row, key in enumerate(seats) if row < count and key not in chosen]
    right = [row for row, key in enumerate(seats) if row >= count and key in chosen]
    for a, b in zip(left, right, strict=True):
        order[a], order[b] = order[b], order[a]
    return order
