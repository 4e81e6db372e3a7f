"""Rows to micro-batches with as much to compute as one another."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.functional.lines import Pieces, SortedRows

Parts = list[list[int]]


def balance(
    lengths_of_rows: Tensor,
    micro_batches: int,
    token_budget: int | None = None,
    padded: bool = False,
    openings: SortedRows | None = None,
) -> list[Tensor]:
    """Row numbers for each of ``micro_batches`` micro-batches of about equal size; some may be empty.

    The longest row that is left goes to the smallest micro-batch. Where padding counts, rows are sorted by length and
    cut into runs instead, so that rows of a micro-batch are alike. Where what rows open with is computed once, they are
    sorted by their tokens and cut, if that leaves less to compute in the largest micro-batch.

    Args:
        lengths_of_rows: tokens of each row, int [B].
        token_budget: most tokens of a micro-batch. What rows share counts for each of them: attention holds it so.
        padded: whether padding counts, for a model that computes it: rows x longest row.
        openings: the same rows, for a model that computes once what they share.

    Raises:
        ConfigurationError: the rows do not fit ``micro_batches`` within ``token_budget``.
    """
    order = torch.argsort(lengths_of_rows, descending=True, stable=True)
    ordered = lengths_of_rows[order].clamp(min=1).tolist()  # a row without a token to train is computed all the same
    size, parts = (_alike if padded else _dealt)(ordered, micro_batches)
    if token_budget is not None and size > token_budget:
        raise ConfigurationError(
            f"data.token_budget={token_budget} tokens a micro-batch is too small: {len(order)} rows over "
            f"micro_batches={micro_batches} need {size}; raise data.micro_batches or the budget"
        )
    if openings is not None:
        computed, siblings = _together(openings, micro_batches)
        held = max(sum(openings.lengths[place] for place in part) for part in siblings)
        if computed < size and (token_budget is None or held <= token_budget):
            order, parts = torch.tensor(openings.order, dtype=torch.long), siblings
    return [order[part] for part in parts]


def _dealt(ordered: Sequence[int], micro_batches: int) -> tuple[int, Parts]:
    """Places of rows, longest first, in each micro-batch, and the tokens of the largest."""
    parts: Parts = [[] for _ in range(micro_batches)]
    sizes = [(0, number) for number in range(micro_batches)]
    for place, length in enumerate(ordered):
        size, number = sizes[0]
        parts[number].append(place)
        heapq.heapreplace(sizes, (size + length, number))
    return max(sizes)[0], parts


def _alike(ordered: Sequence[int], micro_batches: int) -> tuple[int, Parts]:
    """The same in runs of neighbours, each as large as its number of rows times its longest."""
    return _runs(len(ordered), micro_batches, lambda start, _: ordered[start])


def _together(rows: SortedRows, micro_batches: int) -> tuple[int, Parts]:
    """The same in runs of rows that open alike, each as large as what there is to compute."""

    def added(start: int, place: int) -> int:
        shared = rows.shared[place] if place > start else 0
        return rows.lengths[place] - (shared if shared >= rows.shortest else 0)

    _, parts = _runs(len(rows.order), micro_batches, added)
    return max(Pieces.of(rows.part(part[0], part[-1] + 1)).tokens for part in parts if part), parts


def _runs(rows: int, micro_batches: int, added: Callable[[int, int], int]) -> tuple[int, Parts]:
    """Runs of neighbours, of about equal size.

    Args:
        added: what the row at a place adds to the size of a run that begins at a start.
    """
    size, most = max((added(place, place) for place in range(rows)), default=1), sum(added(0, p) for p in range(rows))
    while size < most:  # the smallest size with which the rows fit the number of micro-batches
        middle = (size + most) // 2
        if len(_cut(rows, middle, added)) <= micro_batches:
            most = middle
        else:
            size = middle + 1
    runs = _cut(rows, size, added)
    return size, runs + [[] for _ in range(micro_batches - len(runs))]


def _cut(rows: int, most: int, added: Callable[[int, int], int]) -> Parts:
    """Runs of at most that size, or of a single row."""
    runs: Parts = []
    size = 0
    for place in range(rows):
        if runs and size + added(runs[-1][0], place) <= most:
            runs[-1].append(place)
            size += added(runs[-1][0], place)
        else:
            runs.append([place])
            size = added(place, place)
    return runs
