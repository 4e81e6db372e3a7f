"""Rows to micro-batches: every row once, about equal work, siblings together where that is less work."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.functional.lines import Pieces, SortedRows, line_of
from sorl_lightning.rollout.micro_batches import balance


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 200), max_size=40), st.integers(1, 8), st.booleans())
def test_every_row_lands_in_one_micro_batch(row_lengths: list[int], micro_batches: int, padded: bool) -> None:
    parts = balance(torch.tensor(row_lengths, dtype=torch.long), micro_batches, padded=padded)
    assert len(parts) == micro_batches
    assert sorted(torch.cat(parts).tolist()) == list(range(len(row_lengths)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=40), st.integers(1, 8))
def test_micro_batches_differ_by_a_row_at_most(row_lengths: list[int], count: int) -> None:
    sizes = [sum(row_lengths[row] for row in part.tolist()) for part in balance(torch.tensor(row_lengths), count)]
    assert max(sizes) - min(sizes) <= max(row_lengths)
    assert max(sizes) <= sum(row_lengths) / count + max(row_lengths) * (1 - 1 / count)


def test_micro_batches_hold_about_as_many_tokens_or_as_much_with_padding() -> None:
    row_lengths = torch.tensor([10, 1, 1, 1, 10, 1])
    assert [sorted(part.tolist()) for part in balance(row_lengths, 2)] == [[0, 1, 3], [2, 4, 5]]
    assert [sorted(part.tolist()) for part in balance(row_lengths, 2, padded=True)] == [[0, 4], [1, 2, 3, 5]]


@pytest.mark.parametrize("padded", [False, True])
def test_rows_that_do_not_fit_the_budget_are_refused_before_training(padded: bool) -> None:
    balance(torch.tensor([10, 10, 10, 10]), 2, token_budget=20, padded=padded)
    with pytest.raises(ConfigurationError, match=r"token_budget=19 .* 4 rows over micro_batches=2 need 20"):
        balance(torch.tensor([10, 10, 10, 10]), 2, token_budget=19, padded=padded)


def test_a_budget_counts_padding_where_a_model_computes_it() -> None:
    balance(torch.tensor([10, 2]), 1, token_budget=12)
    with pytest.raises(ConfigurationError, match=r"need 20"):
        balance(torch.tensor([10, 2]), 1, token_budget=12, padded=True)


def families(openings: list[int], siblings: int, own: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each opening of so many tokens some siblings, of ``own`` tokens each."""
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randint(1000, (size,), generator=generator) for size in openings]
    ends = torch.randint(1000, (len(openings), siblings, own), generator=generator)
    rows = [torch.cat([start, end]) for start, family in zip(starts, ends, strict=True) for end in family]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows])


def computed(ids: torch.Tensor, lengths: torch.Tensor, parts: list[torch.Tensor]) -> list[int]:
    return [len(line_of(ids[part], lengths[part], 16).source) for part in parts if len(part)]


def test_siblings_go_together_where_that_is_less_to_compute() -> None:
    ids, lengths = families([100, 100, 100], siblings=4, own=10)
    parts = balance(lengths, 3, openings=SortedRows.of(ids, lengths, 16))
    assert sorted(sorted(part.tolist()) for part in parts) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert computed(ids, lengths, parts) == [140] * 3
    assert computed(ids, lengths, balance(lengths, 3)) == [340] * 3  # dealt by length alone: some of each


def test_rows_are_dealt_as_ever_where_they_share_nothing_or_too_little() -> None:
    for shortest, size in ((16, 12), (200, 100)):
        ids, lengths = families([size, size], siblings=4, own=10)
        plain = balance(lengths, 2)
        shared = balance(lengths, 2, openings=SortedRows.of(ids, lengths, shortest))
        assert [part.tolist() for part in plain] == [part.tolist() for part in shared]


def test_a_budget_counts_what_siblings_share_for_each_of_them() -> None:
    ids, lengths = families([100, 40], siblings=3, own=10)
    openings = SortedRows.of(ids, lengths, 16)
    together = balance(lengths, 2, token_budget=330, openings=openings)
    assert sorted(sorted(part.tolist()) for part in together) == [[0, 1, 2], [3, 4, 5]]
    apart = balance(lengths, 2, token_budget=329, openings=openings)  # three of the long ones no longer fit
    assert max(int(lengths[part].sum()) for part in apart) <= 329
    with pytest.raises(ConfigurationError, match=r"token_budget=200 .* 6 rows over micro_batches=2 need 260"):
        balance(lengths, 2, token_budget=200, openings=openings)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(1, 6),
)
def test_with_shared_openings_every_row_lands_once_and_no_micro_batch_grows(
    rows: list[list[int]], count: int, shortest: int
) -> None:
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    openings = SortedRows.of(ids, lengths, shortest)
    parts = balance(lengths, count, openings=openings)
    assert sorted(torch.cat(parts).tolist()) == list(range(len(rows)))
    dealt = max(int(lengths[part].sum()) for part in balance(lengths, count))
    largest = max(Pieces.of(SortedRows.of(ids[part], lengths[part], shortest)).tokens for part in parts if len(part))
    assert largest <= dealt
