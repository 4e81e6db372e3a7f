"""Student and teacher over the same tokens: in a training step, and when rows are collected."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from sorl_lightning import ranks
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.functional.chunked_topk import chunked_topk
from sorl_lightning.functional.divergences import topk_entropy
from sorl_lightning.functional.logprobs import token_logprobs
from sorl_lightning.functional.turn_factors import top_overlap
from sorl_lightning.functional.turns import fill
from sorl_lightning.networks import PolicyNetwork, Readout, predicted
from sorl_lightning.objectives import Objective, TeacherObjective
from sorl_lightning.padding_free import is_padding_free
from sorl_lightning.rollout.packing import lengths, select
from sorl_lightning.teachers import FullTeacher, Teacher
from sorl_lightning.types import Comparison, RolloutBatch, TokenSignals
from sorl_lightning.value_networks import ValueHead, ValueNetwork, values_after

ROWS_AT_ONCE = 32  # rows scored together where no gradient is needed
OVERLAP = 16  # tokens whose overlap says how far student and teacher have drifted apart


def check_teacher(objective: Objective, teacher: Teacher | None) -> None:
    """Refuse an objective without the teacher that it needs, and the other way round.

    Raises:
        ConfigurationError: names what is missing, or what the teacher can give.
    """
    name = type(objective).__name__
    if not isinstance(objective, TeacherObjective):
        if teacher is not None:
            raise ConfigurationError(f"model.teacher is set, and objective {name} never asks one: leave it out")
    elif teacher is None:
        raise ConfigurationError(f"objective {name} needs a teacher: set model.teacher")
    elif objective.recorded_top_k is None and not isinstance(teacher, FullTeacher):
        raise ConfigurationError(
            f"objective {objective} needs the teacher's whole distribution; {type(teacher).__name__} returns the "
            "log-probabilities of its top K and of the sampled token: take a topk_ divergence, k1 or k2"
        )


def meet(
    objective: Objective,
    teacher: Teacher,
    student: str,
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: int,
    temperature: float,
) -> None:
    """Attach the teacher to its student, and have it refuse what it cannot give.

    Raises:
        ConfigurationError: it reads other tokens, or cannot give the scores that the objective needs.
    """
    teacher.attach(student, tokenizer, vocabulary)
    if isinstance(objective, TeacherObjective) and objective.recorded_top_k is not None:
        teacher.check(objective.recorded_top_k, objective.tempered(temperature))


def recorded(objective: Objective, teacher: Teacher | None, rows: RolloutBatch, temperature: float) -> RolloutBatch:
    """Rows with the teacher's scores, where the objective reads recorded ones."""
    if not isinstance(objective, TeacherObjective) or objective.recorded_top_k is None:
        return rows
    assert teacher is not None
    return rows.replace(teacher=teacher.score(rows, objective.recorded_top_k, objective.tempered(temperature)))


def forward(
    policy: PolicyNetwork,
    objective: Objective,
    teacher: Teacher | None,
    batch: RolloutBatch,
    temperature: float,
    value_network: ValueHead | ValueNetwork | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, RolloutBatch]:
    """Log-probabilities and entropies of the policy, values, and the batch with its comparison to the teacher, if any.

    The values are those after each token, by ``value_network``, a critic's.
    """
    head = value_network if isinstance(value_network, ValueHead) else None
    inputs = (batch.input_ids, batch.position_ids, batch.generated, temperature)
    if isinstance(objective, TeacherObjective):
        readout = None
        if objective.recorded_top_k is None:
            assert isinstance(teacher, FullTeacher)
            readout = teacher.readout(batch)
        compare = objective.compare(batch, readout, temperature)
        logprobs, entropy, divergence, *values = policy(*inputs, compare, head)
        teacher_entropy = _teacher_entropy(batch, readout, objective.tempered(temperature)).to(divergence.dtype)
        batch = batch.replace(comparison=Comparison(divergence=divergence, teacher_entropy=teacher_entropy))
    else:
        logprobs, entropy, *values = policy(*inputs, value_head=head)
    if isinstance(value_network, ValueNetwork):
        values = [values_after(value_network, policy, batch, temperature)]
    return logprobs, entropy, values[0] if values else None, batch


@torch.no_grad()
def _teacher_entropy(batch: RolloutBatch, readout: Readout | None, temperature: float) -> Tensor:
    mask = predicted(batch.generated)
    if readout is not None:
        return fill(mask, token_logprobs(*readout, batch.input_ids[mask], temperature)[1])
    assert batch.teacher is not None
    return fill(mask, topk_entropy(batch.teacher.logprobs[mask]))


@torch.no_grad()
def token_signals(
    policy: PolicyNetwork,
    objective: Objective,
    teacher: Teacher | None,
    rows: RolloutBatch,
    temperature: float,
    device: torch.device,
) -> TokenSignals:
    """What a weighting of turns may look at, under the present weights of the policy; on the CPU.

    Raises:
        ConfigurationError: the objective has no teacher.
    """
    if teacher is None:
        raise ConfigurationError(f"a weighting of turns needs a teacher, and {type(objective).__name__} has none")
    found = torch.zeros(4, *rows.turn.shape)
    for index, part in parts(rows, policy, device):
        _, entropy, _, compared = forward(policy, objective, teacher, part, temperature)
        assert compared.comparison is not None
        mask = predicted(part.generated)
        own = policy.readout(part.input_ids, part.position_ids, part.generated)
        mine, _, _ = chunked_topk(*own, part.input_ids[mask], OVERLAP, temperature)
        scores = teacher.score(part, OVERLAP, temperature)
        overlap = fill(mask, top_overlap(mine, scores.ids.to(mask.device)[mask]))
        confidence = fill(mask, scores.logprobs.to(mask.device)[mask].amax(-1).exp())
        values = (compared.comparison.divergence, entropy, confidence, overlap)
        found[:, index, : mask.shape[1]] = torch.stack([value.float().cpu() for value in values])
    names = ("divergence", "student_entropy", "teacher_confidence", "overlap")
    return TokenSignals(turn=rows.turn, trajectory=rows.trajectory, **dict(zip(names, found, strict=True)))


def parts(rows: RolloutBatch, policy: PolicyNetwork, device: torch.device) -> Iterator[tuple[Tensor, RolloutBatch]]:
    """A few rows at a time, on ``device``, and their numbers; padding where other ranks have more.

    Neighbours, which are siblings mostly; rows of like length for a policy that computes padding.
    """
    sizes = lengths(rows)
    order = torch.arange(len(sizes)) if is_padding_free(policy.model) else torch.argsort(sizes)
    indices = list(order.split(ROWS_AT_ONCE))
    # Sharded networks run as often on every rank.
    indices += [indices[0][:0]] * (max(ranks.gather(len(indices))) - len(indices))
    for index in indices:
        yield index, select(rows, index).to(device)
