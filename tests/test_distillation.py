"""Distillation through real fits: right gradients, whoever played and however it was cut."""

from __future__ import annotations

import dataclasses

import lightning as L
import pytest
import torch

from conftest import TINY, agent
from distilling import FULL, RECORDED, TEACHER, flat, rewarded, rollouts, student, watched
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.functional.divergences import divergence, sampled_divergence, topk_divergence
from sorl_lightning.models import SmallLlama
from sorl_lightning.objectives import Distillation, PolicyGradient
from sorl_lightning.teachers import LocalTeacher, Teacher
from sorl_lightning.types import TeacherScores

KINDS = {"topk_reverse_kl": ("reverse_kl", False), "topk_reverse_kl_tail": ("reverse_kl", True),
         "topk_forward_kl_tail": ("forward_kl", True)}  # fmt: skip


def by_hand(batch, name, top_k=50):
    """Gradient of the weighted divergence, from both models' full logits."""
    model, other = TINY.load()[0].double(), TEACHER.load()[0]
    generated = batch.generated.clone()
    generated[:, 0] = False
    mine = model(input_ids=batch.input_ids).logits[generated.roll(-1, 1)]
    theirs = other(input_ids=batch.input_ids).logits.detach().double()[generated.roll(-1, 1)]
    ids = batch.input_ids[generated]
    if name in KINDS:
        top = theirs.log_softmax(-1).topk(top_k)
        values = topk_divergence(mine, top.indices, top.values, *KINDS[name])
    elif name in FULL:
        values = divergence(mine, theirs, name)
    else:
        logprobs, teacher = (x.log_softmax(-1).gather(-1, ids[:, None])[:, 0] for x in (mine, theirs))
        values = sampled_divergence(logprobs, teacher, name)
        if name == "k1":  # every ratio is 1: the surrogate's gradient is that of the advantage times log p
            values = values.detach() * logprobs
    (values * batch.trajectory_weights[generated]).sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("name", [*FULL, *RECORDED])
def test_the_gradient_is_the_divergences_own(fit, name) -> None:
    from sorl_lightning.rollout.engines import LocalEngine

    watch = watched(fit, student(name), rollouts(engine=LocalEngine(dtype=None)))
    expected = by_hand(watch.batches[0], name)
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(watch.gradients[0], expected, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("name", [*FULL, *RECORDED])
def test_a_teacher_equal_to_the_student_gives_no_loss_and_no_gradient(fit, name) -> None:
    """For any mask, a one-token response included; only the truncated top-K moves (AReaL #1728)."""

    def script(request):
        ids = [700, 701, request.stop_token_ids[0]][: 1 + request.seed % 3]
        return ids, [-6.0] * len(ids)

    from doubles import ScriptedEngine

    watch = watched(fit, student(name, teacher=TINY), rollouts(engine=ScriptedEngine(script)), max_epochs=1)
    lengths = {int((row == turn).sum()) for batch in watch.batches for row in batch.turn for turn in row.unique()[1:]}
    assert lengths == {1, 2, 3}
    if name == "topk_reverse_kl":
        assert watch.gradients[0].abs().max() > 1e-6
        return
    if name == "k1":  # -k1 as an advantage: 0 everywhere
        assert watch.figures[0]["train/divergence"] == pytest.approx(0, abs=1e-6)
    assert watch.figures[0]["train/policy_loss"] == pytest.approx(0, abs=1e-6)
    assert watch.gradients[0].abs().max() < 1e-6


def test_as_many_as_the_vocabulary_is_the_full_divergence(fit) -> None:
    full = watched(fit, student("reverse_kl"), rollouts())
    top = watched(fit, student("topk_reverse_kl_tail", distillation={"top_k": 10**6}), rollouts())
    torch.testing.assert_close(top.gradients[0], full.gradients[0], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["reverse_kl", "topk_reverse_kl_tail", "k1"])
def test_any_split_into_micro_batches_gives_the_same_update(fit, name) -> None:
    results = []
    for micro_batches in (1, 5, 20):
        module = student(name)
        watch = watched(fit, module, rollouts(micro_batches=micro_batches))
        results.append((flat(module), watch.figures[0], watch.statistics[0]))
    for parameters, figures, statistics in results[1:]:
        torch.testing.assert_close(parameters, results[0][0], rtol=0, atol=1e-7)
        assert figures["train/divergence"] == pytest.approx(results[0][1]["train/divergence"], rel=1e-5)
        for field in dataclasses.fields(statistics):
            found, whole = getattr(statistics, field.name), getattr(results[0][2], field.name)
            torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)


def test_statistics_by_turn_are_those_of_the_collection(fit) -> None:
    data = rollouts()
    watch = watched(fit, student(), data, max_epochs=2)
    statistics, trajectories = watch.statistics[-1], data.collection.trajectories
    for turn in range(4):
        assert statistics.trajectories[turn] == sum(len(t.turns) > turn for t in trajectories)
        assert statistics.tokens[turn] == sum(
            len(t.turns[turn].completion.token_ids) for t in trajectories if len(t.turns) > turn
        )
        assert statistics.all_last_turns[turn] == sum(len(t.turns) == turn + 1 for t in trajectories)
        assert statistics.success_last_turns[turn] == sum(t.success and len(t.turns) == turn + 1 for t in trajectories)
    mean = statistics.divergence_sum.sum() / statistics.tokens.sum()
    assert float(mean) == pytest.approx(watch.figures[-1]["train/divergence"], rel=1e-5)


def test_off_policy_losses_are_corrected_within_bounds(fit) -> None:
    plain = watched(fit, student(), rollouts())
    clipped = watched(fit, student(distillation={"ratio_clip": (0.1, 10.0)}), rollouts())
    batch = plain.batches[0]
    module = agent()
    module.configure_model()
    with torch.no_grad():
        logprobs, _ = module.policy.double()(batch.input_ids, batch.position_ids, batch.generated)
    ratios = (logprobs - batch.behaviour_logprobs)[batch.generated].exp()
    assert ratios.max() > 10 or ratios.min() < 0.1 or (ratios - 1).abs().max() > 0.1
    weights = batch.trajectory_weights.double()
    weights[batch.generated] *= ratios.clamp(0.1, 10)
    batch = batch.replace(trajectory_weights=weights)
    torch.testing.assert_close(clipped.gradients[0], by_hand(batch, "reverse_kl"), rtol=2e-4, atol=2e-6)


def test_a_reward_adds_its_own_policy_gradient(fit) -> None:
    both = watched(fit, rewarded(), rollouts())
    alone = watched(fit, student(), rollouts())
    reward = watched(fit, agent(objective=PolicyGradient()), rollouts())
    torch.testing.assert_close(both.gradients[0], alone.gradients[0] + reward.gradients[0], rtol=1e-5, atol=1e-8)


def test_temperature_is_that_of_both_distributions(fit) -> None:
    hot = watched(fit, student(distillation={"temperature": 2.0}), rollouts()).figures[0]["train/divergence"]
    warm = watched(fit, student(), rollouts()).figures[0]["train/divergence"]
    assert hot < warm


def test_a_teacher_is_in_no_checkpoint_and_never_trains(trainer, tmp_path) -> None:
    module = student()
    saver = L.pytorch.callbacks.ModelCheckpoint(tmp_path, save_last=True)
    before = TEACHER.load()[0].state_dict()
    trainer(enable_checkpointing=True, callbacks=[saver]).fit(module, datamodule=rollouts())
    names = torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"]
    assert all(name.startswith("policy.") for name in names)
    assert len(list(module.parameters())) == len(list(module.policy.parameters()))
    assert all(torch.equal(before[name], value) for name, value in module.teacher.model.state_dict().items())


def test_a_teacher_of_another_vocabulary_is_refused_by_both_names(fit, tmp_path) -> None:
    model, tokenizer = TEACHER.load()
    tokenizer.add_tokens(["xyzzy"])
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=rf"teacher .*{tmp_path}.* and student SmallLlama.* different vocab"):
        fit(agent(objective=Distillation(), teacher=LocalTeacher(str(tmp_path))), rollouts())


def wider(rows: int):
    """The student with ``rows`` more logits over the same vocabulary, which no token of it uses."""

    class Wider(SmallLlama):
        def load(self):
            model, tokenizer = super().load()
            with torch.random.fork_rng():
                model.resize_token_embeddings(model.config.vocab_size + rows, mean_resizing=False)
                model.get_output_embeddings().weight.data[-rows:] = 5.0
            return model, tokenizer

    return Wider(**{f.name: getattr(TINY, f.name) for f in dataclasses.fields(TINY)})


@pytest.mark.parametrize("name", FULL)
def test_logits_of_another_width_are_cut_before_the_softmax(fit, name) -> None:
    """Qwen2.5 0.5B has 151936 logits, 7B 152064 (TRL #2215)."""
    for module in (student(name, teacher=wider(64)), student(name, teacher=TINY, policy=wider(64))):
        watch = watched(fit, module, rollouts())
        assert watch.figures[0]["train/divergence"] == pytest.approx(0, abs=1e-6)


class Served(Teacher):
    """A teacher that can say no more than a server would."""

    def __init__(self) -> None:
        self.local = LocalTeacher(TEACHER)

    def attach(self, student, tokenizer, vocabulary) -> None:
        self.local.attach(student, tokenizer, vocabulary)

    def score(self, rows, top_k, temperature) -> TeacherScores:
        return self.local.score(rows, top_k, temperature)

    def close(self) -> None:
        self.local.close()


def test_a_served_teacher_only_adds_an_implementation(fit) -> None:
    served = agent(objective=Distillation(divergence="topk_reverse_kl_tail", ratio_clip=None), teacher=Served())
    watch = watched(fit, served, rollouts())
    local = watched(fit, student("topk_reverse_kl_tail"), rollouts())
    assert torch.equal(watch.gradients[0], local.gradients[0])


def test_what_a_served_teacher_cannot_give_is_named(fit) -> None:
    with pytest.raises(ConfigurationError, match="Served returns the log-probabilities of its top K"):
        fit(agent(objective=Distillation(), teacher=Served()), rollouts())


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (lambda: agent(objective=Distillation()), "needs a teacher: set model.teacher"),
        (lambda: agent(teacher=LocalTeacher(TEACHER)), "PolicyGradient never asks one"),
    ],
)
def test_a_teacher_and_an_objective_belong_together(fit, module, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        fit(module(), rollouts())


@pytest.mark.parametrize(
    "settings",
    [{"divergence": "kl"}, {"beta": 2.0}, {"top_k": 0}, {"temperature": 0.0}, {"ratio_clip": (2.0, 3.0)},
     {"divergence": "k1", "temperature": 2.0}, {"epsilon_low": 0.0}],
)  # fmt: skip
def test_bad_settings(settings) -> None:
    with pytest.raises(ConfigurationError, match=rf"objective\.{list(settings)[-1]}"):
        Distillation(**settings)
