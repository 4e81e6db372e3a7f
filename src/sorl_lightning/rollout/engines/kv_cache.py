"""Keys and values of many sequences at once, addressed by row and position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import Cache

GROWTH = 2
CLEANED_AHEAD = 32


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of the cache that one forward pass works on.

    Attributes:
        indices: the rows, in the order of the batch.
        first: the first of them, where they follow one another and a view will do instead of a copy; else None.
    """

    indices: Int[Tensor, "B"]
    first: int | None

    @classmethod
    def of(cls, rows: Sequence[int], device: torch.device) -> Rows:
        """The rows that ``rows`` lists."""
        contiguous = list(rows) == list(range(rows[0], rows[0] + len(rows)))
        return cls(torch.tensor(rows, device=device), rows[0] if contiguous else None)

    def read(self, store: Tensor, length: int) -> Tensor:
        """The first ``length`` positions of these rows of ``store`` [rows, heads, slots, head_dim]."""
        visible = store[:, :, :length]
        if self.first is None:
            return visible.index_select(0, self.indices)
        return visible[self.first : self.first + len(self.indices)]


class RowCache(Cache):
    """A cache whose slot j holds position j, whatever the batch looks like.

    Rows may have any lengths and forward passes may take any rows: ``aim`` says which rows and positions the next one
    writes. It then sees the first ``length`` positions of each row, stale slots among them, which the caller's mask
    hides. One slot more than ``slots`` takes what padding writes (``padding_slot``), and is never seen.

    Args:
        slots: positions to make room for at first; ``reserve`` adds to them.
    """

    def __init__(self, slots: int = 0) -> None:
        super().__init__(layers=[])
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.rows = 0
        self.slots = slots
        # Slots from 0 on that hold numbers in every row. A masked slot has probability 0, but 0 times the NaN of stray
        # memory would be NaN. Cleaned as sequences grow, for the system hands out memory page by page as it is touched.
        self._clean = 0

    @property
    def padding_slot(self) -> int:
        """Where a padding token writes."""
        return self.slots

    def reserve(self, rows: int, slots: int) -> None:
        """Make room for ``rows`` sequences of ``slots`` positions; what is cached stays."""
        if rows <= self.rows and slots <= self.slots:
            return
        held = self.rows
        self.rows = max(rows, held)
        if slots > self.slots:
            self.slots = max(slots, GROWTH * self.slots)
        for stores in (self.keys, self.values):
            for layer, old in enumerate(stores):
                stores[layer] = self._allocate(old)
                stores[layer][:held, :, : self._clean] = old[:, :, : self._clean]

    def aim(self, rows: Rows, slots: Int[Tensor, "B Q"], length: int) -> None:
        """Choose what the next forward pass writes and sees.

        Args:
            rows: rows of the batch.
            slots: slot that each token of the batch writes: its position, or ``padding_slot``.
            length: positions that attention sees.
        """
        if length > self._clean:
            end = min(self.slots, length + CLEANED_AHEAD)
            for store in (*self.keys, *self.values):
                store[:, :, self._clean : end] = 0
            self._clean = end
        self._aim = rows, slots, length
        self._flat: dict[int, Tensor] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new keys and values [B, heads, Q, head_dim] of one layer; returns what attention sees."""
        if layer_idx == len(self.keys):
            self.keys.append(self._allocate(key_states))
            self.values.append(self._allocate(value_states))
        rows, _, length = self._aim
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        index = self._flat_index(key_states.shape[1])
        for store, new in ((keys, key_states), (values, value_states)):
            width = new.shape[-1]
            store.view(-1, width).index_copy_(0, index, new.transpose(1, 2).reshape(-1, width))
        return rows.read(keys, length), rows.read(values, length)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions that attention sees."""
        return self._aim[2]

    def copy_rows(self, source: Sequence[int], target: Sequence[int], length: int) -> None:
        """Copy the first ``length`` positions of the rows ``source`` over those of the rows ``target``."""
        if not source:
            return
        for store in (*self.keys, *self.values):
            store[list(target), :, :length] = store[list(source), :, :length]

    def _allocate(self, like: Tensor) -> Tensor:
        """A store for heads and widths as in ``like``, zero in the slots that may have been seen."""
        _, heads, _, width = like.shape
        store = like.new_empty(self.rows, heads, self.slots + 1, width)
        store[:, :, : self._clean] = 0
        return store

    def _flat_index(self, heads: int) -> Tensor:
        """Where each [B, Q, heads] vector lies in a store seen as a list of vectors; the same in all layers."""
        if heads not in self._flat:
            rows, slots, _ = self._aim
            head = torch.arange(heads, device=slots.device)
            base = (rows.indices[:, None, None] * heads + head) * (self.slots + 1)
            self._flat[heads] = (base + slots[:, :, None]).flatten()
        return self._flat[heads]
