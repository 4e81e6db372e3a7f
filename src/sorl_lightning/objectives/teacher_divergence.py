"""How far the student is from the teacher at a token: over the whole vocabulary, the top K, or what was sampled."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from sorl_lightning.functional.chunked_divergence import chunked_divergence
from sorl_lightning.functional.chunked_topk import chunked_topk_divergence
from sorl_lightning.functional.divergences import Estimator, Kind, sampled_divergence
from sorl_lightning.networks import Readout, common_vocabulary

Divergence = Literal[
    "reverse_kl", "forward_kl", "jsd",
    "topk_reverse_kl", "topk_reverse_kl_tail", "topk_forward_kl_tail",
    "k1", "k2", "k3",
]  # fmt: skip
# Each top-K name: its kind, and whether the other tokens count.
TOP_K: dict[str, tuple[Kind, bool]] = {
    "topk_reverse_kl": ("reverse_kl", False),
    "topk_reverse_kl_tail": ("reverse_kl", True),
    "topk_forward_kl_tail": ("forward_kl", True),
}
SAMPLED = get_args(Estimator)


@dataclass(frozen=True, kw_only=True)
class TeacherTokens:
    """What is known of the teacher at N tokens, and how the student is compared with it.

    Attributes:
        teacher: the teacher's readout; None where its scores were recorded.
        scores: its ids [N, K], their log-probabilities, the sampled token's [N], nats.
        divergence: name of the divergence.
        beta: weight of the teacher in "jsd".
        temperature: of both distributions.
    """

    teacher: Readout | None
    scores: tuple[Tensor, Tensor, Tensor] | None
    divergence: Divergence
    beta: float
    temperature: float

    def at(self, part: Tensor) -> TeacherTokens:
        """Some of the tokens."""
        teacher = None if self.teacher is None else self.teacher._replace(hidden=self.teacher.hidden[part])
        scores = None
        if self.scores is not None:
            ids, logprobs, sampled = self.scores
            scores = ids[part], logprobs[part], sampled[part]
        return dataclasses.replace(self, teacher=teacher, scores=scores)

    def compared(self, student: Readout, logprobs: Tensor, forward: bool = False) -> Tensor:
        """The divergence [N]; with ``forward`` the forward KL of the same family, for tokens that the teacher sampled.

        Args:
            logprobs: the student's log-probability of each token, nats.
        """
        if self.teacher is not None:
            kind: Kind = "forward_kl" if forward else cast(Kind, self.divergence)
            own, other = common_vocabulary(student, self.teacher)
            return chunked_divergence(*own, *other, kind, self.beta, self.temperature)
        assert self.scores is not None
        ids, scores, sampled = self.scores
        if self.divergence in TOP_K:
            kind, tail = ("forward_kl", True) if forward else TOP_K[self.divergence]
            return chunked_topk_divergence(*student, ids, scores, kind, tail, temperature=self.temperature)
        sampled = sampled.to(logprobs.dtype)
        if forward:
            return sampled - logprobs
        return sampled_divergence(logprobs, sampled, cast(Estimator, self.divergence))

    def compared_by_author(self, student: Readout, logprobs: Tensor, by_teacher: Tensor) -> Tensor:
        """The divergence [N]; at the tokens ``by_teacher``, bool [N], the forward KL of the same family."""
        values = torch.zeros_like(logprobs)
        for part, forward in ((~by_teacher, False), (by_teacher, True)):
            own = student._replace(hidden=student.hidden[part])
            found = self.at(part).compared(own, logprobs[part], forward)
            values = values.masked_scatter(part, found.to(values.dtype))
        return values
