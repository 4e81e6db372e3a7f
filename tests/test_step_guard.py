"""Numbers that are none never reach the optimiser."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from conftest import agent
from doubles import Countdown, ScriptedEngine, random_words
from sorl_lightning.callbacks import ClippingTriggeredNormalization
from sorl_lightning.datamodule import RolloutDataModule
from sorl_lightning.errors import ConfigurationError, TrainingError
from sorl_lightning.objectives import PolicyGradient
from test_training import Recorder, flat


def rollouts(engine=None, **settings) -> RolloutDataModule:
    limits = {"tasks_per_collection": 3, "group_size": 4, "max_turns": 4, "max_tokens": 4, "context_limit": 128}
    return RolloutDataModule(Countdown(), engine or ScriptedEngine(), **{**limits, **settings})


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


class Broken(PolicyGradient):
    """Policy gradient whose loss or gradient is not finite in the calls ``at``."""

    at: tuple[int, ...] = ()
    how = "value"
    calls = 0

    def terms(self, batch, logprobs, entropy, weights):
        terms, metrics = super().terms(batch, logprobs, entropy, weights)
        type(self).calls += 1
        if type(self).calls - 1 in self.at:
            root = (terms.policy - terms.policy.detach()).abs().sqrt()  # 0, with a gradient of 0 * inf
            terms = dataclasses.replace(terms, policy=terms.policy + (math.nan if self.how == "value" else root))
        return terms, metrics


def broken(at, how="value") -> Broken:
    return type("Once", (Broken,), {"at": tuple(at), "how": how})()


class Watch(Recorder):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.parameters = [*getattr(self, "parameters", [flat(pl_module)]), flat(pl_module)]


@pytest.mark.parametrize("how", ["value", "gradient"])
def test_a_step_with_nan_changes_nothing_and_is_counted(fit, how) -> None:
    watch = Watch()
    switch = ClippingTriggeredNormalization(rule="max1")
    data = rollouts(mini_batches=3)
    module = fit(
        agent(objective=broken([1], how), optimizer=adamw), data, callbacks=[switch, watch], gradient_clip_val=1.0
    )
    first, second, third = watch.parameters[1:]
    assert torch.equal(first, second)
    assert torch.isfinite(third).all()
    assert not torch.equal(second, third)
    assert module.policy_version == 2
    assert watch.figures[-1]["train/skipped_steps"] == 1
    assert module.trainer.optimizers[0].state[next(iter(module.policy.parameters()))]["step"] == 2


def test_one_bad_micro_batch_skips_the_whole_update(fit) -> None:
    watch = Watch()
    module = fit(agent(objective=broken([0]), optimizer=adamw), rollouts(micro_batches=3), callbacks=[watch])
    assert torch.equal(watch.parameters[0], flat(module))
    assert module.policy_version == 0


def test_a_run_of_skipped_steps_ends_the_run_with_its_weights_sound(fit) -> None:
    module = agent(objective=broken(range(1, 9)), optimizer=adamw, max_skipped_steps=2)
    with pytest.raises(TrainingError, match=r"3 optimiser steps in a row.*max_skipped_steps=2.*not finite"):
        fit(module, rollouts(passes=8))
    assert module.policy_version == 1
    assert torch.isfinite(flat(module)).all()


def test_steps_between_sound_ones_are_not_in_a_row(fit) -> None:
    module = agent(objective=broken([1, 3, 5]), optimizer=adamw, max_skipped_steps=1)
    fit(module, rollouts(passes=7))
    assert module.steps.state_dict() == {"skipped": 3, "in_a_row": 0}
    assert module.policy_version == 4


def test_without_a_token_to_train_no_decay_happens_either(fit) -> None:
    module = agent(optimizer=adamw)
    watch = Watch()
    fit(module, rollouts(ScriptedEngine(lambda request: ([], []))), callbacks=[watch])
    assert torch.equal(watch.parameters[0], flat(module))
    assert watch.figures[-1]["train/loss"] == 0
    assert (module.policy_version, module.steps.skipped) == (0, 1)


def reward_is(value):
    return lambda trajectory: value if trajectory.task.id == "train-1" and trajectory.sibling == 1 else 1.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_bad_reward_leaves_mask_and_denominator_and_its_siblings_are_unharmed(fit, value) -> None:
    watch = Watch()
    objective = PolicyGradient(advantage="reward")
    data = rollouts(reward=reward_is(value))
    module = fit(agent(objective=objective), data, callbacks=[watch])
    assert watch.figures[-1]["rollout/dropped_trajectories"] == data.collection.dropped == 1
    (batch,) = watch.batches
    kept = [t for t in data.collection.trajectories if t.is_finite]
    assert int(batch.generated.sum()) == sum(t.generated_tokens for t in kept)
    assert float(batch.trajectory_weights.sum()) == pytest.approx(1.0)
    assert torch.isfinite(flat(module)).all()
    assert module.policy_version == 1


def test_figures_by_turn_are_told_apart_by_the_trajectories_that_are_left(fit) -> None:
    def reward(trajectory):  # the first is dropped; the successes that are left are of whom it would stand before
        return math.nan if (trajectory.group, trajectory.sibling) == (0, 0) else 1.0

    data = rollouts(reward=reward)
    module = fit(agent(), data)
    failed = [0.0] * len(module.turn_profile.failed_tokens)
    for trajectory in data.collection.trajectories:
        for turn in trajectory.turns if trajectory.is_finite and not trajectory.success else ():
            failed[turn.index] += len(turn.completion.token_ids)
    assert module.turn_profile.failed_tokens.tolist() == failed


def test_a_bad_logprob_drops_its_trajectory(fit) -> None:
    def script(request):
        ids, logprobs = random_words(request)
        return ids, [math.nan if request.trajectory == (0, 0) else value for value in logprobs]

    data = rollouts(ScriptedEngine(script))
    fit(agent(), data)
    assert data.collection.dropped == 1


def test_a_bad_advantage_drops_its_trajectory(fit) -> None:
    class Odd(PolicyGradient):
        def advantages(self, trajectories):
            advantages = super().advantages(trajectories)
            advantages[2] = math.inf
            return advantages

    data = rollouts()
    watch = Watch()
    fit(agent(objective=Odd()), data, callbacks=[watch])
    assert data.collection.dropped == 1
    assert 2 not in watch.batches[0].trajectory[watch.batches[0].generated]


def test_the_count_survives_a_checkpoint() -> None:
    module, other = agent(), agent()
    module.steps.skipped, module.steps.in_a_row = 3, 1
    other.steps.load_state_dict(module.steps.state_dict())
    assert other.steps.state_dict() == {"skipped": 3, "in_a_row": 1}


def test_a_negative_bound_is_refused(fit) -> None:
    with pytest.raises(ConfigurationError, match="max_skipped_steps must be 0 or more, got -1"):
        fit(agent(max_skipped_steps=-1), rollouts())
