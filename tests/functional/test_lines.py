"""Rows as a line of tokens: nothing is lost, and what rows open with lies in it once."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sorl_lightning.functional.lines import Line, Piece, line_of


def of(rows: list[str], shortest: int | None) -> tuple[str, Line, list[str]]:
    """The line's text, the line, and the rows as read back from it."""
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor([*map(ord, row)]) for row in rows], batch_first=True)
    line = line_of(ids, lengths, shortest)
    text = "".join(map(chr, ids.flatten()[line.source].tolist()))
    tokens = iter("".join(text[place] for place in line.place.tolist()))
    return text, line, ["".join(next(tokens) for _ in row) for row in rows]


def test_the_worked_example() -> None:
    rows = ["sspqaaa", "sspqbb", "ssrcc"]
    text, line, back = of(rows, 2)
    assert text == "sspqaaabbrcc"
    assert line.pieces == (Piece(2, None), Piece(2, 0), Piece(3, 1), Piece(2, 1), Piece(3, 0))
    assert back == rows


def test_too_short_an_opening_is_laid_for_each_row() -> None:
    rows = ["sspqaaa", "sspqbb", "ssrcc"]
    text, line, back = of(rows, 3)
    assert text == "sspqaaabbssrcc"
    assert line.pieces == (Piece(4, None), Piece(3, 0), Piece(2, 0), Piece(5, None))
    assert back == rows
    assert of(rows, None)[:2][0] == "".join(rows)


def test_equal_rows_and_a_row_that_another_goes_on_from_are_laid_once() -> None:
    rows = ["abcd", "abcdef", "abcd", "abcdef"]
    text, line, back = of(rows, 1)
    assert text == "abcdef"
    assert line.pieces == (Piece(4, None), Piece(2, 0))
    assert back == rows


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text("abc", min_size=1, max_size=9), min_size=1, max_size=9), st.integers(1, 4))
def test_rows_come_back_whole_each_token_after_those_before_it(rows: list[str], shortest: int) -> None:
    text, line, back = of(rows, shortest)
    assert back == rows
    assert len(text) == sum(piece.size for piece in line.pieces) == len(line.source)
    # Following the openings back from a piece reads the row up to its end.
    ends = [sum(piece.size for piece in line.pieces[: number + 1]) for number in range(len(line.pieces))]
    texts: list[str] = []
    for (size, opening), end in zip(line.pieces, ends, strict=True):
        texts.append(("" if opening is None else texts[opening]) + text[end - size : end])
    assert set(rows) <= set(texts)
    assert all(any(row.startswith(whole) for row in rows) for whole in texts)
    if shortest == 1:  # a trie: as many tokens as there are different beginnings
        assert len(text) == len({row[: end + 1] for row in rows for end in range(len(row))})
