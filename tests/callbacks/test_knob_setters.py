"""Every setter does what its formula says, to the gradient of a real fit; two of one knob are refused."""

from __future__ import annotations

import itertools

import pytest
import torch

from conftest import TINY, agent
from distilling import TEACHER, Knowing, flat, rewarded, rollouts, student, watched
from doubles import Countdown
from sorl_lightning import callbacks as switches
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.functional import turn_factors
from sorl_lightning.functional.weights import reweighted, trajectory_weights, turn_weights
from sorl_lightning.objectives import PolicyGradient
from sorl_lightning.types import TokenSignals

MAKE = {
    "RolloutDepthController": lambda: switches.RolloutDepthController(warmup=1),
    "KLScheduleTransition": switches.KLScheduleTransition,
    "FixedDepth": lambda: switches.FixedDepth(2),
    "TOPD": switches.TOPD,
    "POPD": switches.POPD,
    "TCODF2B": switches.TCODF2B,
    "TCODB2F": switches.TCODB2F,
    "GuidedOPD": switches.GuidedOPD,
    "ATODTurnWeights": switches.ATODTurnWeights,
    "ATODAnnealing": switches.ATODAnnealing,
    "SAGEOPD": lambda: switches.SAGEOPD(weak=0.0, strong=0.4),
    "PruneOPD": lambda: switches.PruneOPD(rate=0.1),
    "TurnDecay": switches.TurnDecay,
}
DEPTH = ("RolloutDepthController", "FixedDepth", "TOPD", "POPD", "TCODF2B")
WEIGHTING = ("ATODTurnWeights", "SAGEOPD", "PruneOPD", "TurnDecay")


def test_two_setters_of_one_knob_are_refused_with_both_names(fit) -> None:
    for pair in [*itertools.combinations(DEPTH, 2), *itertools.combinations(WEIGHTING, 2)]:
        with pytest.raises(ConfigurationError, match=r"{0} and {1} both set|{1} and {0} both set".format(*pair)):
            fit(student(), rollouts(), callbacks=[MAKE[name]() for name in pair])


@pytest.mark.parametrize("name", ["KLScheduleTransition", "GuidedOPD", "ATODAnnealing"])
def test_a_schedule_without_a_planned_end_is_refused(fit, name) -> None:
    data = rollouts()
    with pytest.raises(ConfigurationError, match=f"{name} is a schedule over the whole run"):
        fit(rewarded(), data, callbacks=[MAKE[name]()], max_epochs=-1)
    assert data.engine.requests == []


def test_a_hard_transition_needs_no_end(fit) -> None:
    class Stop(switches.CollectionAxis):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.should_stop = True

    module = student()
    fit(module, rollouts(), callbacks=[switches.KLScheduleTransition("hard"), Stop()], max_epochs=-1)
    assert module.kl_schedule.turn_blend == 1.0


@pytest.mark.parametrize(
    ("shape", "start", "end", "seen"),
    [
        ("linear", 0.0, 1.0, [0.0, 0.25, 0.5, 0.75]),
        ("linear", 0.25, 0.75, [0.0, 0.0, 0.5, 1.0]),
        ("cosine", 0.0, 1.0, [0.0, 0.146447, 0.5, 0.853553]),
        ("hard", 0.0, 1.0, [1.0] * 4),
    ],
)
def test_the_blend_follows_the_steps_taken(fit, shape, start, end, seen) -> None:
    switch = switches.KLScheduleTransition(shape, start, end)
    watch = watched(fit, student(), rollouts(mini_batches=2), switch, max_epochs=2)
    blends = [watch.figures[0]["kl_schedule/turn_blend"], watch.figures[1]["kl_schedule/turn_blend"]]
    assert blends == pytest.approx([seen[1], seen[3]], abs=1e-6)


def weighted(fit, weigh):
    """Gradient of a plain fit whose weights ``weigh`` has changed on their way to the loss."""

    class Reweighed(type(student().objective)):
        def terms(self, batch, logprobs, entropy, weights):
            return super().terms(batch, logprobs, entropy, weigh(batch, weights))

    module = student()
    object.__setattr__(module, "objective", Reweighed(ratio_clip=None))
    return watched(fit, module, rollouts()).gradients[0]


def test_without_a_blend_the_loss_is_seq_mean_token_mean(fit) -> None:
    plain = watched(fit, student(), rollouts())
    batch = plain.batches[0]
    generated = batch.generated
    rows = [1 / (len(generated) * int(row.sum())) * row.double() for row in generated]
    torch.testing.assert_close(batch.trajectory_weights.double(), torch.stack(rows), rtol=0, atol=1e-8)
    exact = trajectory_weights(batch.turn, batch.trajectory)
    torch.testing.assert_close(weighted(fit, lambda b, w: exact), plain.gradients[0], rtol=0, atol=1e-10)


def test_a_hard_transition_trains_under_turn_weights(fit) -> None:
    hard = watched(fit, student(), rollouts(), switches.KLScheduleTransition("hard"))
    expected = weighted(fit, lambda batch, weights: turn_weights(batch.turn, batch.trajectory))
    torch.testing.assert_close(hard.gradients[0], expected, rtol=1e-6, atol=1e-8)
    assert not torch.allclose(hard.gradients[0], watched(fit, student(), rollouts()).gradients[0])


def test_turn_decay_changes_the_gradient_as_its_formula_says(fit) -> None:
    decayed = watched(fit, student(), rollouts(), switches.TurnDecay(0.5))
    expected = weighted(fit, lambda b, w: reweighted(w, torch.where(b.turn >= 0, 0.5 ** b.turn.clamp(min=0), 0.0)))
    torch.testing.assert_close(decayed.gradients[0], expected, rtol=1e-6, atol=1e-9)


def signals_by_hand(batch) -> TokenSignals:
    """What student and teacher say of the tokens of ``batch``, from their whole logits."""
    mask = batch.generated.clone()
    mask[:, 0] = False
    mine, theirs = (
        source.load()[0].double()(input_ids=batch.input_ids).logits[mask.roll(-1, 1)].detach().log_softmax(-1)
        for source in (TINY, TEACHER)
    )
    tops = [logprobs.topk(16).indices for logprobs in (mine, theirs)]
    found = {
        "divergence": (mine.exp() * (mine - theirs)).sum(-1),
        "student_entropy": -(mine.exp() * mine).sum(-1),
        "teacher_confidence": theirs.exp().amax(-1),
        "overlap": (tops[0][:, :, None] == tops[1][:, None]).any(-1).double().mean(-1),
    }
    placed = {name: values.new_zeros(mask.shape).masked_scatter(mask, values) for name, values in found.items()}
    return TokenSignals(turn=batch.turn, trajectory=batch.trajectory, **placed)


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("ATODTurnWeights", turn_factors.disagreement_factors),
        ("SAGEOPD", lambda found: turn_factors.confidence_factors(found, weak=0.0, strong=0.4)),
        ("PruneOPD", lambda found: turn_factors.drift_factors(found, rate=0.1)),
    ],
)
def test_weightings_change_the_gradient_as_their_formula_says(fit, name, formula) -> None:
    watch = watched(fit, student(), rollouts(), MAKE[name]())
    expected = weighted(fit, lambda batch, weights: reweighted(weights, formula(signals_by_hand(batch))))
    torch.testing.assert_close(watch.gradients[0], expected, rtol=1e-4, atol=1e-6)  # factors are kept in float32
    assert (watch.gradients[0] - watched(fit, student(), rollouts()).gradients[0]).abs().max() > 1e-5


def test_a_blend_is_the_same_in_any_split(fit) -> None:
    ends = []
    for micro_batches in (1, 5, 20):
        module = student()
        watched(fit, module, rollouts(micro_batches=micro_batches), switches.KLScheduleTransition(), max_epochs=3)
        ends.append(flat(module))
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=1e-7)
    torch.testing.assert_close(ends[2], ends[0], rtol=0, atol=1e-7)
    plain = student()
    watched(fit, plain, rollouts(), max_epochs=3)
    assert (flat(plain) - ends[0]).abs().max() > 1e-6


@pytest.mark.parametrize("name", WEIGHTING)
def test_weightings_keep_the_total_and_any_split_gives_the_same_update(fit, name) -> None:
    results = []
    for micro_batches in (1, 5):
        module = student()
        watch = watched(fit, module, rollouts(micro_batches=micro_batches), MAKE[name]())
        for weights in ("trajectory_weights", "turn_weights"):
            total = sum(float(getattr(batch, weights).sum()) for batch in watch.batches)
            assert total == pytest.approx(1.0, abs=1e-5)
        results.append(flat(module))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-7)
    plain = student()
    watched(fit, plain, rollouts())
    assert (flat(plain) - results[0]).abs().max() > 1e-6


@pytest.mark.parametrize(
    ("switch", "depths"),
    [
        (switches.FixedDepth(3), [3] * 5),
        (switches.TOPD(0.5), [2] * 5),
        (switches.POPD(1, 1, 1), [1, 2, 3, 4, 4]),
        (switches.TCODF2B(1, 2), [1, 1, 2, 2, 3]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_depth_schedules_cut_collections(fit, switch, depths) -> None:
    seen = []

    class Depths(switches.CollectionAxis):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append(max(len(t.turns) for t in trainer.datamodule.collection.trajectories))

    fit(student(), rollouts(Countdown([4] * 3)), callbacks=[switch, Depths()], max_epochs=5)
    assert seen == depths


def test_from_back_to_front_the_expert_plays_first_and_is_never_trained(fit) -> None:
    data, prefixes = rollouts(Knowing([4] * 3)), []

    class Prefixes(switches.CollectionAxis):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            trajectories = trainer.datamodule.collection.trajectories
            prefixes.append({sum(turn.author == "expert" for turn in t.turns) for t in trajectories})
            assert not batch.by_teacher
            first = min(int(row[row >= 0].min()) for row in batch.turn if (row >= 0).any())
            assert first == max(prefixes[-1])

    fit(student(), data, callbacks=[switches.TCODB2F(every=1), Prefixes()], max_epochs=5)
    assert prefixes == [{3}, {2}, {1}, {0}, {0}]
    texts = {turn.text for t in data.collection.trajectories for turn in t.turns if turn.author == "expert"}
    assert texts == set()


def test_an_environment_without_an_expert_is_refused(fit) -> None:
    with pytest.raises(ConfigurationError, match="an expert needs an environment with expert_action, and Countdown"):
        fit(student(), rollouts(), callbacks=[switches.TCODB2F()])


def test_guided_turns_are_the_teachers_and_train_by_the_forward_kl(fit) -> None:
    from sorl_lightning.rollout.engines import LocalEngine

    data = rollouts(engine=LocalEngine())
    guided = watched(fit, student(), data, switches.GuidedOPD())  # the first collection: probability 1
    batch = guided.batches[0]
    assert (batch.by_teacher == batch.generated).all()
    assert {turn.author for t in data.collection.trajectories for turn in t.turns} == {"teacher"}
    from test_distillation import by_hand

    torch.testing.assert_close(guided.gradients[0], by_hand(batch, "forward_kl"), rtol=2e-4, atol=2e-6)


def test_the_teacher_plays_ever_less(fit) -> None:
    shares = []

    class Shares(switches.CollectionAxis):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            turns = [turn for t in trainer.datamodule.collection.trajectories for turn in t.turns]
            shares.append(sum(turn.author == "teacher" for turn in turns) / len(turns))

    fit(student(), rollouts(), callbacks=[switches.GuidedOPD(), Shares()], max_epochs=10)
    assert shares[0] == 1.0
    assert 0.2 < shares[4] < 0.8
    assert shares[8:] == [0.0, 0.0]


@pytest.mark.parametrize("divergence", ["jsd", "topk_reverse_kl_tail", "k1", "k2"])
def test_guided_turns_go_with_every_family(fit, divergence) -> None:
    watch = watched(fit, student(divergence), rollouts(), switches.GuidedOPD(end=1.0), max_epochs=2)
    assert all(gradient.isfinite().all() for gradient in watch.gradients)


def test_annealing_moves_the_loss_from_the_teacher_to_rewards(fit) -> None:
    switch = switches.ATODAnnealing(end=0.5)
    watch = watched(fit, rewarded(), rollouts(mini_batches=2, passes=2), switch)
    assert watch.figures[0]["loss_mix/distillation"] == pytest.approx(0.1)
    assert watch.figures[0]["loss_mix/reward"] == pytest.approx(2.0)
    module = rewarded()
    module.objective.mix.distillation, module.objective.mix.reward = 0.1, 2.0
    mixed = watched(fit, module, rollouts()).gradients[0]
    parts = watched(fit, student(), rollouts()), watched(fit, agent(objective=PolicyGradient()), rollouts())
    torch.testing.assert_close(mixed, 0.1 * parts[0].gradients[0] + 2.0 * parts[1].gradients[0], rtol=1e-5, atol=1e-8)


def test_annealing_without_rewards_is_refused(fit) -> None:
    with pytest.raises(ConfigurationError, match=r"set objective\.reward"):
        fit(student(), rollouts(), callbacks=[switches.ATODAnnealing()])


def test_switches_of_different_knobs_commute(fit) -> None:
    chosen = ["RolloutDepthController", "KLScheduleTransition", "TurnDecay", "GuidedOPD", "ATODAnnealing"]
    ends = []
    for order in (chosen, chosen[::-1]):
        module = rewarded()
        fit(module, rollouts(), callbacks=[MAKE[name]() for name in order], max_epochs=3)
        ends.append(flat(module))
    assert torch.equal(*ends)


@pytest.mark.parametrize("divergence", ["reverse_kl", "topk_reverse_kl_tail", "k1"])
def test_every_switch_runs_with_every_family_and_changes_the_update(fit, divergence) -> None:
    def end(*chosen):
        module = student(divergence, distillation={"reward": PolicyGradient()})
        limits = {"group_size": 2, "max_tokens": 4}
        fit(module, rollouts(Knowing([4, 3, 2]), **limits), callbacks=list(chosen), max_epochs=2)
        return flat(module)

    plain = end()
    assert torch.equal(plain, end())
    for name, make in MAKE.items():
        found = end(make())
        assert found.isfinite().all(), name
        assert name == "RolloutDepthController" or not torch.equal(found, plain), name  # it has had one probe so far


def signals(**changes) -> TokenSignals:
    """Two trajectories: turns 0 and 1 of two tokens each, and a turn 0 of one token."""
    turn = torch.tensor([[-1, 0, 0, 1, 1], [-1, 0, -1, -1, -1]])
    held = {name: torch.zeros(2, 5) for name in ("divergence", "student_entropy", "teacher_confidence", "overlap")}
    return TokenSignals(turn=turn, trajectory=torch.tensor([[0] * 5, [1] * 5]), **{**held, **changes})


def test_decay_by_hand() -> None:
    assert turn_factors.decay_factors(signals().turn, 0.5).tolist() == [[0, 1, 1, 0.5, 0.5], [0, 1, 0, 0, 0]]


def test_disagreement_and_uncertainty_by_hand() -> None:
    found = turn_factors.disagreement_factors(
        signals(
            divergence=torch.tensor([[9.0, 1, 3, 0, 0], [9, 4, 9, 9, 9]]),  # means 2, 0, 4: d = .5, 0, 1
            student_entropy=torch.tensor([[9.0, 0, 0, 1, 3], [9, 1, 9, 9, 9]]),  # means 0, 2, 1: h = 0, 1, .5
        )
    )
    torch.testing.assert_close(found, torch.tensor([[0, 0.5, 0.5, 1, 1], [0, 1, 0, 0, 0]]))
    assert turn_factors.disagreement_factors(signals()).tolist() == [[0, 1, 1, 1, 1], [0, 1, 0, 0, 0]]


def test_importance_and_confidence_by_hand() -> None:
    found = turn_factors.confidence_factors(
        signals(
            divergence=torch.tensor([[0, 0.0, 0.1, 0.1, 0.3], [0, 0.5, 0, 0, 0]]),  # means .05, .2, .5
            teacher_confidence=torch.tensor([[0, 1, 1, 0.5, 0.7], [0, 0.9, 0, 0, 0]]),
        )
    )
    torch.testing.assert_close(found, torch.tensor([[0, 0, 0, 0.3, 0.3], [0, 0.9, 0, 0, 0]]))


def test_drift_by_hand() -> None:
    found = turn_factors.drift_factors(
        signals(overlap=torch.tensor([[0, 0.6, 0.7, 0.1, 1.0], [0, 0.69, 0, 0, 0]])), rate=0.4
    )
    torch.testing.assert_close(found, torch.tensor([[0, 1.1, 1.1, 0.7, 0.7], [0, 1.1, 0, 0, 0]]))


def test_overlap_of_two_tops_by_hand() -> None:
    mine, theirs = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4]]), torch.tensor([[4, 9, 8, 1], [5, 6, 7, 8]])
    assert turn_factors.top_overlap(mine, theirs).tolist() == [0.5, 0.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: switches.TurnDecay(0.0), "kappa"),
        (lambda: switches.SAGEOPD(0.5, 0.1), "weak"),
        (lambda: switches.PruneOPD(threshold=2.0), "threshold"),
        (lambda: switches.KLScheduleTransition("steep"), "shape"),
        (lambda: switches.KLScheduleTransition(start=0.5, end=0.5), "start"),
        (lambda: switches.TOPD(0.0), "share"),
        (lambda: switches.POPD(every=0), "every"),
        (lambda: switches.FixedDepth(0), "depth"),
        (lambda: switches.TCODB2F(0), "every"),
        (lambda: switches.GuidedOPD(0.0), "end"),
        (lambda: switches.ATODAnnealing(reward=-1.0), "factors"),
    ],
)
def test_bad_settings(make, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()
