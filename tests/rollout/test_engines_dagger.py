"""The policy leads, the expert says what to do."""

from __future__ import annotations

import torch

from conftest import TINY, agent
from distilling import Knowing
from sorl_lightning.datamodule import RolloutDataModule
from sorl_lightning.objectives import Imitation
from sorl_lightning.rollout.engines import DAggerEngine
from sorl_lightning.rollout.engines.dagger import NEVER

LIMITS = {"tasks_per_collection": 8, "group_size": 1, "max_turns": 4, "max_tokens": 4, "context_limit": 128}


def dagger(fit, policy_turns: float, **settings):
    data = RolloutDataModule(Knowing((4,)), DAggerEngine(policy_turns), **LIMITS)
    module = fit(agent(objective=Imitation(expert_turns_only=True), **settings), data, max_epochs=1)
    return module, [turn for trajectory in data.collection.trajectories for turn in trajectory.turns]


def test_turns_are_shared_as_said_and_marked_by_the_expert(fit) -> None:
    _, turns = dagger(fit, 0.5)
    assert len(turns) == 32
    by_expert = [turn for turn in turns if turn.text == "take coin"]
    assert 8 <= len(by_expert) <= 24
    for turn in turns:
        assert sum(turn.completion.logprobs) == (0.0 if turn.text == "take coin" else NEVER)


def test_without_turns_of_the_policy_the_expert_plays_alone(fit) -> None:
    _, turns = dagger(fit, 0.0)
    assert {turn.text for turn in turns} == {"take coin"}


def test_what_the_expert_would_not_do_is_not_imitated(fit) -> None:
    before = torch.cat([p.flatten() for p in TINY.load()[0].parameters()])
    settings = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1.0)}
    module, turns = dagger(fit, 1.0, **settings)
    assert all(turn.text != "take coin" for turn in turns)
    torch.testing.assert_close(torch.cat([p.detach().flatten() for p in module.policy_model.parameters()]), before)
    module, _ = dagger(fit, 0.0, **settings)
    assert not torch.equal(torch.cat([p.detach().flatten() for p in module.policy_model.parameters()]), before)
