"""Values, returns and advantages of real trajectories; what a critic changes and what it leaves alone."""

from __future__ import annotations

import lightning as L
import pytest
import torch

from conftest import agent
from doubles import Countdown, ScriptedEngine
from sorl_lightning.critic import Critic, JoinedTokens, explained_variance
from sorl_lightning.datamodule import RolloutDataModule
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.objectives import PolicyGradient
from sorl_lightning.types import RolloutBatch


def rollouts(**settings) -> RolloutDataModule:
    defaults = {"tasks_per_collection": 4, "group_size": 1, "max_turns": 3, "max_tokens": 4, "context_limit": 128}
    return RolloutDataModule(Countdown(), ScriptedEngine(), **{**defaults, **settings})


class Batches(L.Callback):
    def __init__(self) -> None:
        self.seen: list[RolloutBatch] = []
        self.policy: list[torch.Tensor] = []
        self.critic: list[torch.Tensor] = []
        self.figures: list[dict[str, float]] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen.append(batch)
        self.policy.append(flat(pl_module.policy))
        self.critic.append(flat(pl_module.value_network))

    def on_train_epoch_end(self, trainer, pl_module):
        self.figures.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def flat(module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in module.parameters()])


def ppo(critic: Critic, **settings):
    return agent(objective=PolicyGradient(advantage="gae", **settings), critic=critic)


def rows(turn, trajectory, **fields) -> RolloutBatch:
    turn, trajectory = torch.tensor(turn), torch.tensor(trajectory)
    zeros = torch.zeros(turn.shape)
    values = {"behaviour_logprobs": zeros, "rewards": zeros, "advantages": zeros, "trajectory_weights": zeros}
    values |= {"turn_weights": zeros, **fields}
    return RolloutBatch(
        input_ids=turn, position_ids=turn, turn=turn, trajectory=trajectory, policy_version=turn, **values
    )


def test_a_trajectory_has_the_same_advantages_in_one_row_and_in_two() -> None:
    whole = rows([[-1, 0, 0, -1, 1, 1], [-1, 0, -1, -1, -1, -1]], [[0] * 6, [1] * 6])
    after = torch.tensor([[0.5, 0.2, 0.7, 0.1, 0.9, 0.4], [0.3, 0.6, 0.0, 0.0, 0.0, 0.0]])
    rewards = torch.tensor([[0.0, 0.0, 1.0, 0.0, 0.0, 2.0], [0.0, 3.0, 0.0, 0.0, 0.0, 0.0]])
    parted = rows([[-1, 0, 0], [-1, 1, 1], [-1, 0, -1]], [[0] * 3, [0] * 3, [1] * 3])
    after_parted = torch.stack([after[0, :3], after[0, 3:], after[1, :3]])
    rewards_parted = torch.stack([rewards[0, :3], rewards[0, 3:], rewards[1, :3]])
    truncated = torch.tensor([True, False])
    critic = Critic(gamma=0.9, lam=0.8, whiten=False)
    one = critic.estimate(whole, after, rewards, truncated)
    two = critic.estimate(parted, after_parted, rewards_parted, truncated)
    for name in ("advantages", "returns", "values"):
        left, right = getattr(one, name), getattr(two, name)
        torch.testing.assert_close(left[whole.generated], right[parted.generated])
        assert not left[~whole.generated].any()
    # by hand: the last token's value before is after[0, 3 + 1], and a truncated trajectory bootstraps from after[0, 5]
    assert float(one.advantages[0, 5]) == pytest.approx(2.0 + 0.9 * 0.4 - 0.9)
    assert float(one.values[0, 1]) == pytest.approx(0.5)
    assert float(one.returns[1, 1]) == pytest.approx(3.0)  # finished: no bootstrap


def test_an_empty_trajectory_is_no_obstacle() -> None:
    tokens = JoinedTokens.of(torch.tensor([[-1, 0], [-1, -1]]), torch.tensor([[0, 0], [1, 1]]), 2)
    assert tokens.last(torch.tensor([[1.0, 5.0], [2.0, 3.0]])).tolist() == [5.0, 0.0]


def test_an_untrained_critic_values_nothing_so_returns_are_the_rewards(fit) -> None:
    recorder, data = Batches(), rollouts(group_size=2)
    fit(ppo(Critic(whiten=False)), data, callbacks=[recorder])
    (batch,) = recorder.seen
    assert not batch.values.any()
    for index, trajectory in enumerate(data.collection.trajectories):
        own = (batch.trajectory == index) & batch.generated
        first = batch.returns[own][0]
        assert float(first) == pytest.approx(trajectory.reward)
    assert recorder.figures[0]["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)


def test_a_replaced_reward_reaches_the_last_token(fit) -> None:
    recorder, data = Batches(), rollouts(reward=lambda trajectory: 7.0)
    fit(ppo(Critic(whiten=False)), data, callbacks=[recorder])
    (batch,) = recorder.seen
    for index in range(4):
        own = (batch.trajectory == index) & batch.generated
        assert float(batch.rewards[own].sum()) == pytest.approx(7.0)
        assert float(batch.returns[own][0]) == pytest.approx(7.0)


def test_whitened_advantages_have_no_mean_and_one_variance(fit) -> None:
    recorder = Batches()
    fit(ppo(Critic()), rollouts(), callbacks=[recorder])
    (batch,) = recorder.seen
    chosen = batch.advantages[batch.generated]
    assert float(chosen.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(chosen.var()) == pytest.approx(1.0, abs=1e-5)


def test_kl_in_the_reward_is_k1_of_each_token(fit) -> None:
    recorder = Batches()
    module = ppo(Critic(whiten=False, lam=0.0, gamma=0.0), kl_coefficient=0.5, kl_in="reward")
    fit(module, rollouts(), callbacks=[recorder])
    (batch,) = recorder.seen
    expected = batch.rewards - 0.5 * (batch.behaviour_logprobs - batch.reference_logprobs)
    torch.testing.assert_close(batch.returns[batch.generated], expected[batch.generated])
    assert "train/reference_kl" in recorder.figures[0]


@pytest.mark.parametrize("backbone", ["own", "policy"])
def test_while_it_warms_up_the_policy_stands_still(fit, backbone) -> None:
    recorder = Batches()
    module = ppo(Critic(backbone=backbone, warmup=2, epsilon=None))
    module.optimizer = lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
    fit(module, rollouts(passes=2), callbacks=[recorder], max_epochs=3)
    assert all(torch.equal(recorder.policy[0], state) for state in recorder.policy[:5])
    assert not torch.equal(recorder.policy[4], recorder.policy[5])
    assert all(not torch.equal(a, b) for a, b in zip(recorder.critic, recorder.critic[1:], strict=False))


def test_values_learn_what_the_policy_earns(fit) -> None:
    recorder = Batches()
    module = ppo(Critic(warmup=60, epsilon=None, lr=1e-2))
    module.optimizer = lambda groups: torch.optim.AdamW(groups, lr=0.0)
    data = RolloutDataModule(
        Countdown([1, 2]), ScriptedEngine(lambda r: ([300 + r.prompt_ids[-1] % 7, r.stop_token_ids[0]], [-6.0, -6.0])),
        tasks_per_collection=2, group_size=1, max_turns=2, max_tokens=4, context_limit=128,
        reward=lambda trajectory: float(len(trajectory.turns)),
    )  # fmt: skip
    fit(module, data, callbacks=[recorder], max_epochs=60)
    assert recorder.figures[-1]["critic/explained_variance"] > 0.9
    assert recorder.figures[-1]["train/value_loss"] < 0.1 * recorder.figures[0]["train/value_loss"]


def test_it_has_its_own_rate_in_the_one_optimiser_and_its_place_in_the_checkpoint(trainer, tmp_path) -> None:
    module = ppo(Critic(lr=0.5))
    saver = L.pytorch.callbacks.ModelCheckpoint(tmp_path, save_last=True)
    runner = trainer(enable_checkpointing=True, callbacks=[saver])
    runner.fit(module, datamodule=rollouts())
    assert [group["lr"] for group in runner.optimizers[0].param_groups] == [0.1, 0.5]
    state = torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"]
    assert torch.equal(state["value_network.head.linear.weight"], module.value_network.head.linear.weight)
    assert {name.split(".")[0] for name in state} == {"policy", "value_network"}


def test_explained_variance_has_its_right_values() -> None:
    turn = [[0, 0, 0, 0]]
    returns = torch.tensor([[1.0, 2.0, 3.0, 4.0]])

    def explained(values):
        return explained_variance(rows(turn, [[0] * 4], values=torch.tensor([values]), returns=returns))

    assert explained([1.0, 2.0, 3.0, 4.0]) == 1.0
    assert explained([9.0, 9.0, 9.0, 9.0]) == 0.0
    assert explained([4.0, 3.0, 2.0, 1.0]) == pytest.approx(-3.0)


@pytest.mark.parametrize(
    "settings", [{"gamma": 1.1}, {"lam": -0.1}, {"lr": 0.0}, {"epsilon": 0.0}, {"coefficient": 0.0}, {"warmup": -1}]
)
def test_bad_settings(settings) -> None:
    with pytest.raises(ConfigurationError, match=rf"critic\.{next(iter(settings))}"):
        Critic(**settings)
