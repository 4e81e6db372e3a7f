"""Trajectories to rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sorl_lightning.functional.turns import row_lengths
from sorl_lightning.types import RolloutBatch, Trajectory, Turn


@dataclass
class _Row:
    """One row in the making: a maximal run of turns whose prompts extend what came before.

    Attributes:
        turns: with their rewards.
    """

    trajectory: int
    turns: list[tuple[Turn, float]] = field(default_factory=list)

    @property
    def ids(self) -> Iterator[int]:
        """All tokens."""
        last, _ = self.turns[-1]
        return chain(last.prompt_ids, last.completion.token_ids)

    def extended_by(self, turn: Turn) -> bool:
        if not self.turns:
            return True
        last, _ = self.turns[-1]
        said = len(last.prompt_ids)
        heard = said + len(last.completion.token_ids)
        return turn.prompt_ids[:said] == last.prompt_ids and turn.prompt_ids[said:heard] == last.completion.token_ids


def rows_of(index: int, trajectory: Trajectory) -> Iterator[_Row]:
    """The rows of one trajectory: a new one starts where a prompt does not extend the previous turn's tokens."""
    row = _Row(index)
    for turn, reward in zip(trajectory.turns, trajectory.turn_rewards, strict=True):
        if not row.extended_by(turn):
            yield row
            row = _Row(index)
        row.turns.append((turn, reward))
    if row.turns:
        yield row


def pack(trajectories: Sequence[Trajectory]) -> RolloutBatch:
    """All rows of ``trajectories``, padded to the longest; ``trajectory`` counts from 0 in the order given.

    An expert's turns are context: they were replayed for the policy to go on from. Weights and advantages are left at
    0: they depend on the optimiser batch and on the objective.
    """
    rows = [row for index, trajectory in enumerate(trajectories) for row in rows_of(index, trajectory)]
    if not rows:
        return padding_batch()
    ids = pad_sequence([_tensor(row.ids, torch.long) for row in rows], batch_first=True)
    spans = _Spans.of(rows, ids.shape)
    completions = [turn.completion for turn in spans.turns]
    indices = _tensor((turn.index for turn in spans.turns), torch.long)
    by_teacher = _tensor((turn.author == "teacher" for turn in spans.turns), torch.bool)
    logprobs = _tensor(chain.from_iterable(completion.logprobs for completion in completions), torch.float32)
    versions = _tensor(chain.from_iterable(completion.policy_version for completion in completions), torch.long)
    zeros = torch.zeros(ids.shape)
    return RolloutBatch(
        input_ids=ids,
        position_ids=torch.arange(ids.shape[1]).expand(ids.shape),
        turn=spans.placed(indices.repeat_interleave(spans.sizes), -1),
        trajectory=torch.tensor([row.trajectory for row in rows])[:, None].expand(ids.shape),
        behaviour_logprobs=spans.placed(logprobs, 0.0),
        policy_version=spans.placed(versions, -1),
        rewards=spans.on_last_tokens(),
        advantages=zeros,
        trajectory_weights=zeros,
        turn_weights=zeros,
        by_teacher=spans.placed(by_teacher.repeat_interleave(spans.sizes), False) if by_teacher.any() else None,
    )


def _tensor(values: Iterable[float], dtype: torch.dtype) -> Tensor:
    """The numbers as a tensor; torch's own constructor reads Python's several times slower."""
    kind = {torch.long: np.int64, torch.bool: np.bool_, torch.float32: np.float32}[dtype]
    return torch.from_numpy(np.fromiter(values, kind))


@dataclass(frozen=True, kw_only=True)
class _Spans:
    """Where the completions of S turns, which the policy or the teacher played, are in rows.

    Attributes:
        shape: of the rows.
        turns: in row-major order; rewards: of each.
        sizes: generated tokens of each, int [S].
        index: place of each generated token in the flattened rows.
    """

    shape: torch.Size
    turns: list[Turn]
    rewards: list[float]
    sizes: Tensor
    index: Tensor

    @classmethod
    def of(cls, rows: Sequence[_Row], shape: torch.Size) -> _Spans:
        found = [
            (place * shape[1] + len(turn.prompt_ids), turn, reward)
            for place, row in enumerate(rows)
            for turn, reward in row.turns
            if turn.author != "expert" and turn.completion.token_ids
        ]
        turns = [turn for _, turn, _ in found]
        sizes = torch.tensor([len(turn.completion.token_ids) for turn in turns], dtype=torch.long)
        starts = torch.tensor([start for start, _, _ in found], dtype=torch.long) - (sizes.cumsum(0) - sizes)
        index = starts.repeat_interleave(sizes) + torch.arange(int(sizes.sum()))
        return cls(shape=shape, turns=turns, rewards=[r for _, _, r in found], sizes=sizes, index=index)

    def placed(self, values: Tensor, elsewhere: float) -> Tensor:
        """A value for each generated token, as rows."""
        rows = torch.full(self.shape, elsewhere, dtype=values.dtype)
        rows.view(-1)[self.index] = values
        return rows

    def on_last_tokens(self) -> Tensor:
        """Each turn's reward on its last generated token, as rows."""
        rows = torch.zeros(self.shape, dtype=torch.float32)
        rows.view(-1)[self.index[self.sizes.cumsum(0) - 1]] = _tensor(self.rewards, torch.float32)
        return rows


def padding_batch() -> RolloutBatch:
    """A micro-batch with nothing to train: its loss is 0, and its backward pass runs all the same."""
    ids = torch.zeros(1, 2, dtype=torch.long)
    zeros = torch.zeros(1, 2)
    return RolloutBatch(
        input_ids=ids,
        position_ids=torch.arange(2)[None],
        turn=ids - 1,
        trajectory=ids,
        behaviour_logprobs=zeros,
        policy_version=ids - 1,
        rewards=zeros,
        advantages=zeros,
        trajectory_weights=zeros,
        turn_weights=zeros,
    )


def lengths(rows: RolloutBatch) -> Tensor:
    """Tokens of each row up to its last generated one, int [B]."""
    return row_lengths(rows.generated)


def split_trajectories(rows: RolloutBatch) -> bool:
    """Whether a trajectory has generated tokens in more than one row."""
    owners = rows.trajectory[:, 0][rows.generated.any(dim=1)]
    return len(owners) > len(owners.unique())


def select(rows: RolloutBatch, index: Tensor) -> RolloutBatch:
    """Rows ``index``, cut to the longest of them."""
    if len(index) == 0:
        zeros = rows.map(lambda tensor: tensor.new_zeros(1, 2, *tensor.shape[2:]))
        optional = [f.name for f in dataclasses.fields(rows) if f.default is None]
        return padding_batch().replace(**{name: getattr(zeros, name) for name in optional})
    width = max(2, int(lengths(rows)[index].max()))
    return rows.map(lambda tensor: tensor[index, :width])


def finite_rows(rows: RolloutBatch) -> tuple[RolloutBatch, int]:
    """Rows of trajectories whose generated tokens have finite numbers only, and the number of trajectories left out."""
    fields = [getattr(rows, field.name) for field in dataclasses.fields(rows)]
    numbers = [t for t in fields if isinstance(t, Tensor) and t.is_floating_point()]
    trajectory, wrong = rows.trajectory[:, 0], torch.zeros(len(rows.turn), dtype=torch.bool)
    for values in numbers:
        wrong |= (~torch.isfinite(values.reshape(*rows.turn.shape, -1)).all(-1) & rows.generated).any(1)
    unsound = trajectory[wrong].unique()
    return select(rows, (~torch.isin(trajectory, unsound)).nonzero()[:, 0]), len(unsound)
