"""What validation says of an objective beside success, against full logits by hand."""

from __future__ import annotations

import pytest
import torch

from conftest import TINY, agent
from distilling import TEACHER, rollouts, student
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.functional.divergences import divergence, topk_divergence
from sorl_lightning.objectives import Distillation, Imitation

TAGS = {"val/divergence", "val/nll"}


def validated(trainer, module, data):
    """Figures of a validation, and the logits of student and teacher at each generated token with its id."""
    kept = []
    evaluate = data.evaluate
    data.evaluate = lambda split: kept.append(evaluate(split)) or kept[0]
    figures = trainer(limit_val_batches=None).validate(module, datamodule=data, verbose=False)[0]
    mine, theirs, ids = [], [], []
    for turn in (turn for trajectory in kept[0].trajectories for turn in trajectory.turns):
        tokens = torch.tensor([[*turn.prompt_ids, *turn.completion.token_ids]])
        at = slice(len(turn.prompt_ids) - 1, tokens.shape[1] - 1)
        with torch.no_grad():
            mine.append(TINY.load()[0](input_ids=tokens).logits[0, at])
            theirs.append(TEACHER.load()[0](input_ids=tokens).logits[0, at])
        ids += turn.completion.token_ids
    return figures, torch.cat(mine), torch.cat(theirs), torch.tensor(ids)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_divergence_is_the_mean_over_the_students_own_tokens(trainer, temperature) -> None:
    module, data = student(temperature=temperature), rollouts(temperature=temperature)
    figures, mine, theirs, _ = validated(trainer, module, data)
    expected = divergence(mine / temperature, theirs / temperature, "reverse_kl").mean()
    assert expected > 1e-3
    assert figures["val/divergence"] == pytest.approx(float(expected), rel=1e-4)


def test_recorded_scores_are_taken_of_held_out_rollouts_too(trainer) -> None:
    figures, mine, theirs, _ = validated(trainer, student("topk_reverse_kl_tail"), rollouts())
    top = theirs.log_softmax(-1).topk(50)
    expected = topk_divergence(mine, top.indices, top.values, "reverse_kl", True).mean()
    assert figures["val/divergence"] == pytest.approx(float(expected), rel=1e-4)


def test_the_likelihood_is_that_of_what_was_played(trainer) -> None:
    figures, mine, _, ids = validated(trainer, agent(objective=Imitation()), rollouts(group_size=1))
    assert figures["val/nll"] == pytest.approx(float(torch.nn.functional.cross_entropy(mine, ids)), rel=1e-5)


def test_a_loss_of_advantages_has_no_such_figures(trainer) -> None:
    figures = trainer(limit_val_batches=None).validate(agent(), datamodule=rollouts(), verbose=False)[0]
    assert not TAGS & set(figures)


def test_a_missing_teacher_is_named_before_anything_is_sampled(trainer) -> None:
    with pytest.raises(ConfigurationError, match=r"needs a teacher: set model\.teacher"):
        trainer(limit_val_batches=None).validate(agent(objective=Distillation()), datamodule=rollouts(), verbose=False)
