"""Teachers: frozen models that say what they would have generated."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sorl_lightning import ranks
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.functional.chunked_topk import chunked_topk
from sorl_lightning.interfaces import Interface
from sorl_lightning.models import ModelSource, Pretrained
from sorl_lightning.networks import PolicyNetwork, Readout, predicted
from sorl_lightning.sharding import is_sharded, shard_layers
from sorl_lightning.types import RolloutBatch, TeacherScores

TOKENS_AT_ONCE = 16_384  # padded tokens of rows that go through the teacher together


class Teacher(Interface):
    """Scores the student's tokens: top-K log-probabilities, and that of the token that was sampled."""

    @abstractmethod
    def attach(self, student: str, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> None:
        """Meet the student, once, before anything is sampled.

        Args:
            student: its name, for messages.
            tokenizer: its tokenizer.
            vocabulary: logits that it has.

        Raises:
            ConfigurationError: the teacher reads other tokens than the student.
        """
        ...

    def check(self, top_k: int, temperature: float) -> None:
        """Refuse scores that the teacher cannot give, before anything is sampled."""

    @abstractmethod
    def score(self, rows: RolloutBatch, top_k: int, temperature: float) -> TeacherScores:
        """Top K and sampled log-probability at each generated token, on the CPU; ``top_k`` may be 0."""
        ...

    @abstractmethod
    def close(self) -> None:
        """Give back memory and connections. Safe to call twice."""
        ...


class FullTeacher(Teacher):
    """A teacher in this process: its whole distribution can be had, and it can play turns."""

    @abstractmethod
    def readout(self, batch: RolloutBatch) -> Readout:
        """Hidden states at the generated tokens of ``batch``, on its device, and the output layer."""
        ...

    @property
    @abstractmethod
    def model(self) -> PreTrainedModel:
        """The model itself."""
        ...

    @abstractmethod
    def shard(self, mesh: DeviceMesh) -> None:
        """Spread over the ranks of ``mesh``, once, after ``attach``."""
        ...


class LocalTeacher(FullTeacher):
    """A frozen causal language model beside the student, in its own dtype.

    It is kept outside of the module that trains, so no checkpoint holds it. Under FSDP2 its decoder layers are sharded,
    and its output layer is whole on every rank.

    Args:
        source: where it comes from: a source such as Pretrained, or a folder or Hub id.

    Attributes:
        seconds: wall-clock time of its forward passes so far.
    """

    def __init__(self, source: ModelSource | str) -> None:
        self.source: ModelSource = Pretrained(path=source) if isinstance(source, str) else source
        self.seconds = 0.0
        self._network: PolicyNetwork | None = None

    def attach(self, student: str, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> None:
        """Load the model.

        Raises:
            ConfigurationError: its vocabulary is not the student's.
        """
        model, own = self.source.load()
        if own.get_vocab() != tokenizer.get_vocab():
            raise ConfigurationError(
                f"teacher {self.source} and student {student} have different vocabularies: distillation compares token "
                "by token, so both need the same tokenizer"
            )
        self._network = PolicyNetwork(model).eval().requires_grad_(False)
        self._vocabulary = vocabulary

    @torch.no_grad()
    def readout(self, batch: RolloutBatch) -> Readout:
        """Hidden states, some rows at a time; the output layer is cut to the student's vocabulary."""
        start = time.perf_counter()
        network = self._attached()
        chunks = list(_row_chunks(batch))
        own = len(chunks)
        if is_sharded(network):
            # Sharded layers run as often on every rank: once more over the first row where there are no more.
            chunks += [slice(0, 1)] * (max(ranks.gather(own)) - own)
        else:
            network.to(batch.turn.device)
        parts = [
            network.readout(batch.input_ids[rows], batch.position_ids[rows], batch.generated[rows]) for rows in chunks
        ][:own]
        self.seconds += time.perf_counter() - start
        return Readout(torch.cat([part.hidden for part in parts]), parts[0].head_weight[: self._vocabulary])

    @torch.no_grad()
    def score(self, rows: RolloutBatch, top_k: int, temperature: float) -> TeacherScores:
        """As ``Teacher.score``; K is at most the vocabulary."""
        rows = rows.to(self._attached().model.device)
        hidden, head_weight = self.readout(rows)
        start = time.perf_counter()
        mask = predicted(rows.generated)
        found = chunked_topk(hidden, head_weight, rows.input_ids[mask], top_k, temperature)
        ids, logprobs, sampled = (_placed(values, mask).cpu() for values in found)
        self.seconds += time.perf_counter() - start
        return TeacherScores(ids=ids, logprobs=logprobs.float(), sampled_logprobs=sampled.float())

    def shard(self, mesh: DeviceMesh) -> None:
        """Shard the decoder layers."""
        shard_layers(self._attached(), mesh)

    @property
    def model(self) -> PreTrainedModel:
        """The frozen model."""
        return self._attached().model

    def close(self) -> None:
        """Drop the model."""
        self._network = None

    def _attached(self) -> PolicyNetwork:
        if self._network is None:
            raise RuntimeError("LocalTeacher has no model yet; call attach first")
        return self._network


def _row_chunks(batch: RolloutBatch) -> Iterator[slice]:
    """Runs of rows that hold TOKENS_AT_ONCE padded tokens, or one row."""
    rows = max(1, TOKENS_AT_ONCE // batch.turn.shape[1])
    for start in range(0, len(batch.turn), rows):
        yield slice(start, start + rows)


def _placed(values: Tensor, mask: Tensor) -> Tensor:
    """Put [N, ...] back to [B, T, ...], with zeros around."""
    placed = values.new_zeros(*mask.shape, *values.shape[1:])
    placed[mask] = values
    return placed
