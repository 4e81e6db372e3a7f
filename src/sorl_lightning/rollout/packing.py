"""Trajectories to rows, rows to micro-batches."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.functional.turns import row_lengths
from sorl_lightning.types import RolloutBatch, Trajectory, Turn


@dataclass
class _Row:
    """One row in the making: a maximal run of turns whose prompts extend what came before."""

    trajectory: int
    input_ids: list[int] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    by_teacher: list[bool] = field(default_factory=list)

    def add_context(self, ids: Sequence[int]) -> None:
        self.input_ids.extend(ids)
        self.turn.extend([-1] * len(ids))
        self.logprobs.extend([0.0] * len(ids))
        self.versions.extend([-1] * len(ids))
        self.rewards.extend([0.0] * len(ids))
        self.by_teacher.extend([False] * len(ids))

    def add_turn(self, turn: Turn, reward: float) -> None:
        self.add_context(turn.prompt_ids[len(self.input_ids) :])
        completion = turn.completion
        if turn.author == "expert":  # replayed for the policy to go on from
            self.add_context(completion.token_ids)
            return
        self.input_ids.extend(completion.token_ids)
        self.turn.extend([turn.index] * len(completion.token_ids))
        self.logprobs.extend(completion.logprobs)
        self.versions.extend(completion.policy_version)
        self.rewards.extend([0.0] * len(completion.token_ids))
        self.by_teacher.extend([turn.author == "teacher"] * len(completion.token_ids))
        if completion.token_ids:
            self.rewards[-1] = reward

    def extended_by(self, turn: Turn) -> bool:
        return list(turn.prompt_ids[: len(self.input_ids)]) == self.input_ids


def rows_of(index: int, trajectory: Trajectory) -> Iterator[_Row]:
    """The rows of one trajectory: a new one starts where a prompt does not extend the previous turn's tokens."""
    row = _Row(index)
    for turn, reward in zip(trajectory.turns, trajectory.turn_rewards, strict=True):
        if row.input_ids and not row.extended_by(turn):
            yield row
            row = _Row(index)
        row.add_turn(turn, reward)
    if row.input_ids:
        yield row


def pack(trajectories: Sequence[Trajectory]) -> RolloutBatch:
    """All rows of ``trajectories``, padded to the longest; ``trajectory`` counts from 0 in the order given.

    Weights and advantages are left at 0: they depend on the optimiser batch and on the objective.
    """
    rows = [row for index, trajectory in enumerate(trajectories) for row in rows_of(index, trajectory)]
    if not rows:
        return padding_batch()
    turn = _padded([row.turn for row in rows], -1, torch.long)
    zeros = torch.zeros(turn.shape)
    guided = any(any(row.by_teacher) for row in rows)
    return RolloutBatch(
        input_ids=_padded([row.input_ids for row in rows], 0, torch.long),
        position_ids=torch.arange(turn.shape[1]).expand(turn.shape),
        turn=turn,
        trajectory=torch.tensor([row.trajectory for row in rows])[:, None].expand(turn.shape),
        behaviour_logprobs=_padded([row.logprobs for row in rows], 0.0, torch.float32),
        policy_version=_padded([row.versions for row in rows], -1, torch.long),
        rewards=_padded([row.rewards for row in rows], 0.0, torch.float32),
        advantages=zeros,
        trajectory_weights=zeros,
        turn_weights=zeros,
        by_teacher=_padded([row.by_teacher for row in rows], False, torch.bool) if guided else None,
    )


def _padded(rows: Sequence[Sequence[float]], value: float, dtype: torch.dtype) -> Tensor:
    tensors = [torch.tensor(row, dtype=dtype) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)


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


def balance(
    lengths_of_rows: Tensor, micro_batches: int, token_budget: int | None = None, padded: bool = False
) -> list[Tensor]:
    """Row numbers for each of ``micro_batches`` micro-batches of about equal size; some may be empty.

    The longest row that is left goes to the smallest micro-batch. Where padding counts, rows are sorted by length and
    cut into runs instead, so that rows of a micro-batch are alike.

    Args:
        lengths_of_rows: tokens of each row, int [B].
        token_budget: most tokens of a micro-batch.
        padded: whether padding counts, for a model that computes it: rows x longest row.

    Raises:
        ConfigurationError: the rows do not fit ``micro_batches`` within ``token_budget``.
    """
    order = torch.argsort(lengths_of_rows, descending=True, stable=True)
    ordered = lengths_of_rows[order].clamp(min=1).tolist()  # a row without a token to train is computed all the same
    size, parts = (_runs if padded else _dealt)(ordered, micro_batches)
    if token_budget is not None and size > token_budget:
        raise ConfigurationError(
            f"data.token_budget={token_budget} tokens a micro-batch is too small: {len(order)} rows over "
            f"micro_batches={micro_batches} need {size}; raise data.micro_batches or the budget"
        )
    return [order[part] for part in parts]


def _dealt(ordered: Sequence[int], micro_batches: int) -> tuple[int, list[list[int]]]:
    """Places of rows, longest first, in each micro-batch, and the tokens of the largest."""
    parts: list[list[int]] = [[] for _ in range(micro_batches)]
    sizes = [(0, number) for number in range(micro_batches)]
    for place, length in enumerate(ordered):
        size, number = sizes[0]
        parts[number].append(place)
        heapq.heapreplace(sizes, (size + length, number))
    return max(sizes)[0], parts


def _runs(ordered: Sequence[int], micro_batches: int) -> tuple[int, list[list[int]]]:
    """The same in runs of neighbours, each as large as its number of rows times its longest."""
    size, most = max(ordered, default=1), max(ordered, default=1) * max(1, len(ordered))
    while size < most:  # the smallest size with which the rows fit the number of micro-batches
        middle = (size + most) // 2
        if len(_cut(ordered, middle)) <= micro_batches:
            most = middle
        else:
            size = middle + 1
    runs = _cut(ordered, size)
    return size, runs + [[] for _ in range(micro_batches - len(runs))]


def _cut(ordered: Sequence[int], size: int) -> list[list[int]]:
    runs, start = [], 0
    while start < len(ordered):
        end = min(len(ordered), start + size // ordered[start])
        runs.append(list(range(start, end)))
        start = end
    return runs
