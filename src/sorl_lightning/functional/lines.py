"""Ragged rows as one line of tokens: without padding, and with what several rows open with laid once.

A worked example: a and b are siblings, whose prompt p q follows a system prompt s s that the row c has as well.

    rows          s s p q a a a        line          s s | p q | a a a | b b | r c c
                  s s p q b b          opening of    -     s s   p q     p q   s s
                  s s r c c
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

# A piece costs a few kernels of attention in every layer; on a GPU these cost as much as many tokens.
SHORTEST_ON_CPU = 16
SHORTEST_ON_GPU = 256


class Piece(NamedTuple):
    """Tokens that follow one another in a line.

    Attributes:
        size: how many.
        opening: number of the piece that stands before this one in its row; None: this one opens it.
    """

    size: int
    opening: int | None


@dataclass(frozen=True, kw_only=True)
class Line:
    """The first tokens of rows [B, T], N in all, as a line of M.

    Attributes:
        kept: where the N tokens are in the rows.
        source: place in the flattened rows of each token of the line.
        place: place in the line of each of the N tokens, in row-major order.
        pieces: of the line, in order; a piece comes after its opening.
    """

    kept: Bool[Tensor, "B T"]
    source: Int[Tensor, "M"]
    place: Int[Tensor, "N"]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True)
class SortedRows:
    """Rows in lexicographic order, so that those that open alike are neighbours.

    Attributes:
        order: number of each row.
        lengths: of each, tokens.
        shared: tokens that each has in common with the one before it; 0 for the first.
        shortest: fewest tokens that it pays to share.
    """

    order: Sequence[int]
    lengths: Sequence[int]
    shared: Sequence[int]
    shortest: int

    @classmethod
    def of(cls, input_ids: Int[Tensor, "B T"], lengths: Int[Tensor, "B"], shortest: int) -> SortedRows:
        """Sort rows that end after ``lengths`` tokens."""
        ids, sizes = input_ids.int().cpu(), lengths.tolist()
        words = ids.numpy().astype(">u4")  # bytes that compare as the tokens do
        order = sorted(range(len(sizes)), key=lambda row: words[row, : sizes[row]].tobytes())
        ordered, ends = ids[order], [sizes[row] for row in order]
        parted = ordered[1:] != ordered[:-1]
        firsts = parted.byte().argmax(dim=1).masked_fill(~parted.any(dim=1), parted.shape[1]).tolist()
        shared = [min(first, *pair) for first, pair in zip(firsts, pairwise(ends), strict=True)]
        return cls(order=order, lengths=ends, shared=[0, *shared][: len(order)], shortest=shortest)

    @classmethod
    def apart(cls, lengths: Int[Tensor, "B"]) -> SortedRows:
        """Rows of which nothing is shared, in their own order."""
        sizes = lengths.tolist()
        return cls(order=range(len(sizes)), lengths=sizes, shared=[0] * len(sizes), shortest=1)

    def part(self, start: int, end: int) -> SortedRows:
        """Some of the rows, neighbours of one another."""
        shared = [0, *self.shared[start + 1 : end]]
        rows = slice(start, end)
        return dataclasses.replace(self, order=self.order[rows], lengths=self.lengths[rows], shared=shared)


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """How rows are cut into pieces.

    Attributes:
        pieces: in the order of the line.
        origins: a row that holds each piece, and the place in it where the piece starts.
        last: the piece that each row ends with.
    """

    pieces: tuple[Piece, ...]
    origins: Sequence[tuple[int, int]]
    last: Mapping[int, int]

    @classmethod
    def of(cls, rows: SortedRows) -> Pieces:
        """Cut rows where they part from one another."""
        pieces: list[Piece] = []
        origins: list[tuple[int, int]] = []
        last: dict[int, int] = {}
        # Neighbours from ``start`` to ``end``, of which ``laid`` tokens are in the line, up to the end of ``opening``.
        waiting: list[tuple[int, int, int, int | None]] = [(0, len(rows.order), 0, None)] if rows.order else []
        while waiting:
            start, end, laid, opening = waiting.pop()
            common = min([rows.lengths[end - 1], *rows.shared[start + 1 : end]])
            whole = common == rows.lengths[end - 1]  # none of these rows goes on
            if common - laid >= (1 if whole else rows.shortest):
                pieces.append(Piece(common - laid, opening))
                origins.append((rows.order[start], laid))
                laid, opening = common, len(pieces) - 1
            if whole:
                assert opening is not None, "a row has a token at least"
                last |= dict.fromkeys(rows.order[start:end], opening)
                continue
            partings = [place for place in range(start + 1, end) if rows.shared[place] == common]
            waiting += reversed([(a, b, laid, opening) for a, b in pairwise([start, *partings, end])])
        return cls(pieces=tuple(pieces), origins=origins, last=last)

    @property
    def tokens(self) -> int:
        """Of the line."""
        return sum(piece.size for piece in self.pieces)

    def path(self, row: int) -> list[int]:
        """The pieces of a row, in order."""
        piece: int | None = self.last[row]
        found: list[int] = []
        while piece is not None:
            found.append(piece)
            piece = self.pieces[piece].opening
        return found[::-1]


def line_of(input_ids: Int[Tensor, "B T"], lengths: Int[Tensor, "B"], shortest: int | None = None) -> Line:
    """Lay the first ``lengths`` tokens of rows, 1 at least of each, end to end.

    Args:
        input_ids: tokens of the rows, whose positions count from the start of each.
        shortest: fewest tokens of a piece that several rows share; None: nothing is shared.
    """
    device, width = input_ids.device, input_ids.shape[1]
    cut = Pieces.of(SortedRows.apart(lengths) if shortest is None else SortedRows.of(input_ids, lengths, shortest))
    sizes = [piece.size for piece in cut.pieces]
    starts = [0, *accumulate(sizes)]
    spans = [torch.arange(start, start + size) for start, size in zip(starts, sizes, strict=False)]
    sources = [
        span + (row * width + begin - start)
        for span, start, (row, begin) in zip(spans, starts, cut.origins, strict=False)
    ]
    place = torch.cat([spans[piece] for row in range(len(input_ids)) for piece in cut.path(row)])
    return Line(
        kept=torch.arange(width, device=device) < lengths[:, None],
        source=torch.cat(sources).to(device),
        place=place.to(device),
        pieces=cut.pieces,
    )


def shortest_on(device: torch.device) -> int:
    """Fewest tokens of a piece that it pays to share."""
    return SHORTEST_ON_CPU if device.type == "cpu" else SHORTEST_ON_GPU
