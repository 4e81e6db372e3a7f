"""One optimiser step, through a real fit."""

from __future__ import annotations

import lightning as L
import pytest
import torch

from conftest import TINY, agent
from doubles import Countdown, ScriptedEngine
from sorl_lightning.checkpoints import AtomicCheckpointIO
from sorl_lightning.datamodule import Evaluation, RolloutDataModule
from sorl_lightning.errors import ConfigurationError, RolloutError
from sorl_lightning.models import SmallLlama
from sorl_lightning.objectives import Imitation, PolicyGradient
from sorl_lightning.rollout.engines import LocalEngine
from sorl_lightning.rollout.packing import lengths


def rollouts(environment=None, engine=None, **settings) -> RolloutDataModule:
    defaults = {"tasks_per_collection": 3, "group_size": 4, "max_turns": 4, "max_tokens": 4, "context_limit": 128}
    return RolloutDataModule(environment or Countdown(), engine, **{**defaults, **settings})


class Recorder(L.Callback):
    """Keeps what each micro-batch and each update looked like."""

    def __init__(self) -> None:
        self.batches: list = []
        self.versions: list[int] = []
        self.ratios: list[torch.Tensor] = []
        self.figures: list[dict] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append(batch)
        self.versions.append(pl_module.policy_version)
        with torch.no_grad():
            logprobs, _ = pl_module.policy(batch.input_ids, batch.position_ids, batch.generated, pl_module.temperature)
        self.ratios.append((logprobs - batch.behaviour_logprobs)[batch.generated].exp())

    def on_train_epoch_end(self, trainer, pl_module):
        self.figures.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def flat(module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


@pytest.mark.parametrize("aggregation", ["trajectory", "token", "turn", "fixed"])
@pytest.mark.parametrize("ratio", ["token", "turn", "sequence"])
def test_any_split_into_micro_batches_gives_the_same_update_and_the_same_figures(fit, ratio, aggregation) -> None:
    results = []
    for micro_batches in (1, 2, 5, 20):  # 12 rows: the last has micro-batches of padding alone
        recorder = Recorder()
        module = agent(objective=PolicyGradient(ratio=ratio, kl_coefficient=0.1, entropy_coefficient=0.01))
        data = rollouts(engine=ScriptedEngine(), micro_batches=micro_batches, aggregation=aggregation)
        fit(module, data, precision="64-true", callbacks=[recorder], gradient_clip_val=1.0)
        assert module.policy_version == 1
        results.append((flat(module), recorder.figures[-1]))
    start = flat_initial()
    assert (results[0][0] - start).abs().max() > 1e-3
    for parameters, figures in results[1:]:
        torch.testing.assert_close(parameters, results[0][0], rtol=0, atol=1e-10)
        for name, value in results[0][1].items():
            if name.startswith("train/"):
                assert figures[name] == pytest.approx(value, abs=1e-7, rel=1e-6), name  # logged in float32


def flat_initial() -> torch.Tensor:
    model, _ = TINY.load()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).double()


def test_weights_sum_to_one_over_each_update(fit) -> None:
    recorder = Recorder()
    data = rollouts(engine=ScriptedEngine(), micro_batches=2, mini_batches=3, passes=2)
    fit(agent(), data, callbacks=[recorder])
    assert len(recorder.batches) == 12
    for update in range(6):
        weights = [batch.trajectory_weights.sum() for batch in recorder.batches[2 * update : 2 * update + 2]]
        assert float(sum(weights)) == pytest.approx(1.0, abs=1e-6)
    each_pass = [sum(int(batch.generated.sum()) for batch in recorder.batches[6 * p : 6 * p + 6]) for p in range(2)]
    assert each_pass[0] == each_pass[1] == sum(t.generated_tokens for t in data.collection.trajectories)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_every_batch_is_trained_by_the_weights_that_sampled_it(fit, micro_batches) -> None:
    recorder = Recorder()
    data = rollouts(micro_batches=micro_batches)
    fit(agent(), data, callbacks=[recorder], max_epochs=3)
    assert len(recorder.batches) == 3 * micro_batches
    for batch, version, ratio in zip(recorder.batches, recorder.versions, recorder.ratios, strict=True):
        assert set(batch.policy_version[batch.generated].tolist()) == {version}
        torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-5)


def test_with_temperature_both_sides_agree(fit) -> None:
    recorder = Recorder()
    fit(agent(temperature=0.5), rollouts(temperature=0.5), callbacks=[recorder])
    torch.testing.assert_close(recorder.ratios[0], torch.ones_like(recorder.ratios[0]), rtol=0, atol=1e-5)


def test_the_same_run_twice_gives_the_same_tokens_and_the_same_parameters(fit) -> None:
    runs = []
    for _ in range(2):
        data = rollouts(mini_batches=2, micro_batches=2)
        module = fit(agent(), data, max_epochs=2)
        runs.append((flat(module), [t.turns[-1].completion for t in data.collection.trajectories]))
    assert torch.equal(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]


def test_another_seed_gives_other_tokens(fit) -> None:
    samples = []
    for seed in range(2):
        data = rollouts(seed=seed)
        fit(agent(), data)
        samples.append([t.turns[0].completion.token_ids for t in data.collection.trajectories])
    assert samples[0] != samples[1]


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_resumed_run_ends_where_the_uninterrupted_one_does(trainer, tmp_path) -> None:
    def run(epochs, resume=None):
        module, data = agent(optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2)), rollouts(mini_batches=2)
        saver = L.pytorch.callbacks.ModelCheckpoint(tmp_path, save_last=True, save_on_train_epoch_end=True)
        runner = trainer(max_epochs=epochs, enable_checkpointing=True, callbacks=[saver])
        runner.fit(module, datamodule=data, ckpt_path=resume, weights_only=False)
        return module

    whole = run(4)
    run(2)
    resumed = run(4, resume=tmp_path / "last.ckpt")
    assert torch.equal(flat(whole), flat(resumed))
    assert resumed.policy_version == 8


WIDE = SmallLlama(tokenizer="sorl:textworld", hidden_size=64, num_hidden_layers=1, context_length=256)
DEEP = SmallLlama(tokenizer="sorl:textworld", hidden_size=32, num_hidden_layers=2, context_length=256)


@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": WIDE}, r"another model.policy .* its weight \S+ is \[\d+, 32\] there and \[\d+, 64\] here"),
        ({"policy": DEEP}, r"another model.policy .* is missing there and .32, 32. here"),
        ({"optimizer": adamw}, r"another model.optimizer than AdamW: its settings are dampening, .*, weight_decay"),
    ],
    ids=["wider", "deeper", "optimiser"],
)
def test_a_checkpoint_of_another_model_is_refused_in_a_sentence(trainer, tmp_path, settings, message) -> None:
    saver = L.pytorch.callbacks.ModelCheckpoint(tmp_path, save_last=True, save_on_train_epoch_end=True)
    trainer(enable_checkpointing=True, callbacks=[saver]).fit(agent(), datamodule=rollouts())
    engine = ScriptedEngine()
    with pytest.raises(ConfigurationError, match=message):
        trainer(max_epochs=2).fit(
            agent(**settings), datamodule=rollouts(engine=engine), ckpt_path=tmp_path / "last.ckpt", weights_only=False
        )
    assert engine.requests == []


@pytest.mark.parametrize("content", ["nothing", "text", "weights", "other run", "folder"])
def test_what_is_no_checkpoint_is_refused_in_a_sentence(trainer, tmp_path, content) -> None:
    path = tmp_path / "some.ckpt"
    if content == "folder":
        path.mkdir()
    elif content == "weights":
        torch.save({"weight": torch.zeros(2)}, path)
    elif content == "other run":
        module = L.LightningModule()
        runner = L.Trainer(logger=False, accelerator="cpu", plugins=[AtomicCheckpointIO()])
        runner.strategy.connect(module)
        runner.save_checkpoint(path)
    elif content == "text":
        path.write_text("max_turns: 3")
    runner = trainer(max_epochs=2, plugins=[AtomicCheckpointIO()])
    with pytest.raises(ConfigurationError, match=r"^ckpt_path"):
        runner.fit(agent(), datamodule=rollouts(), ckpt_path=path, weights_only=False)


def test_checkpoints_hold_no_reference(trainer, tmp_path) -> None:
    module, data = agent(objective=PolicyGradient(kl_coefficient=0.1)), rollouts()
    saver = L.pytorch.callbacks.ModelCheckpoint(tmp_path, save_last=True)
    trainer(enable_checkpointing=True, callbacks=[saver]).fit(module, datamodule=data)
    names = torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"]
    assert names
    assert all(name.startswith("policy.") for name in names)


def test_the_reference_is_the_initial_policy_and_its_kl_starts_at_zero(fit) -> None:
    recorder = Recorder()
    fit(agent(objective=PolicyGradient(kl_coefficient=0.1)), rollouts(), callbacks=[recorder], max_epochs=2)
    first, second = (figures["train/reference_kl"] for figures in recorder.figures)
    assert first == pytest.approx(0.0, abs=1e-5)
    assert abs(second) > 1e-4


def test_tasks_are_each_played_once_before_one_is_played_twice() -> None:
    data = rollouts(Countdown([1] * 7), tasks_per_collection=3)
    played = [task.id for index in range(7) for task in data.tasks_of_collection(index)]
    assert len(played) == 21
    for start in (0, 7, 14):
        assert len(set(played[start : start + 7])) == 7
    assert played[:7] != played[7:14]


def test_two_validations_see_the_same_tasks_and_seeds(trainer) -> None:
    engine = ScriptedEngine()
    data = rollouts(engine=engine, validation=Evaluation(n=2))
    runner = trainer(limit_val_batches=None)
    runner.validate(agent(), datamodule=data, verbose=False)
    first = sorted((r.trajectory, r.prompt_ids, r.seed) for r in engine.requests)
    engine.requests.clear()
    figures = runner.validate(agent(), datamodule=data, verbose=False)[0]
    assert first == sorted((r.trajectory, r.prompt_ids, r.seed) for r in engine.requests)
    assert figures["val/episodes"] == 6
    assert figures["val/turns"] == 2


def test_validation_runs_at_full_depth(trainer) -> None:
    data = rollouts(engine=ScriptedEngine())
    data.rollout_budget.limit(1)
    figures = trainer(limit_val_batches=None).validate(agent(), datamodule=data, verbose=False)[0]
    assert figures["val/turns"] == 2


def test_imitation_learns_what_the_expert_says(fit) -> None:
    def script(request):
        return [700, 701, request.stop_token_ids[0]], [0.0] * 3

    recorder = Recorder()
    module = agent(objective=Imitation(), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2))
    fit(module, rollouts(engine=ScriptedEngine(script), group_size=1), callbacks=[recorder], max_epochs=60)
    assert recorder.figures[0]["train/nll"] > 6
    assert recorder.figures[-1]["train/nll"] < 0.05


@pytest.mark.parametrize(
    ("settings", "objective", "message"),
    [
        ({"max_turns": 0}, PolicyGradient(), r"data.max_turns must be at least 1, got 0"),
        ({"step_timeout": 0.0}, PolicyGradient(), r"data.step_timeout must be above 0 seconds, got 0.0"),
        ({"group_size": 1}, PolicyGradient(), r"data.group_size must be at least 2, got 1"),
        ({"group_size": 2}, Imitation(), r"data.group_size=1, got 2"),
        ({"temperature": 0.0}, PolicyGradient(), r"data.temperature must be above 0"),
        ({"mini_batches": 13}, PolicyGradient(), r"data.mini_batches=13 is more than .* 12"),
        ({"environment": Countdown([])}, PolicyGradient(), r"Countdown has no tasks in its 'train' split"),
        ({"validation": Evaluation(n=0)}, PolicyGradient(), r"data.validation.n must be at least 1, got 0"),
        ({"context_limit": 4}, PolicyGradient(), r"context_limit=4"),
        ({"token_budget": 127}, PolicyGradient(), r"data.token_budget=127 .* less than .* data.context_limit=128"),
        (
            {"token_budget": 40, "context_limit": 40},
            PolicyGradient(),
            r"data.token_budget=40 .* 12 first prompts have \d\d\d tokens, for mini_batches=1 x micro_batches=1",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_is_sampled(fit, settings, objective, message) -> None:
    engine = ScriptedEngine()
    with pytest.raises(ConfigurationError, match=message):
        fit(agent(objective=objective), rollouts(engine=engine, **settings))
    assert engine.requests == []


def test_accumulation_must_equal_micro_batches(trainer) -> None:
    with pytest.raises(ConfigurationError, match=r"accumulate_grad_batches=1 must equal data.micro_batches=2"):
        trainer().fit(agent(), datamodule=rollouts(micro_batches=2))


def test_an_exception_gives_the_engine_back(fit) -> None:
    class Stop(L.Callback):
        def on_train_batch_start(self, *_):
            raise KeyError("stop")

    engine = ScriptedEngine()
    with pytest.raises(KeyError, match="stop"):
        fit(agent(), rollouts(engine=engine), callbacks=[Stop()])
    assert engine.closed == 1


def test_the_engines_copy_is_its_own(fit) -> None:
    engine = LocalEngine()
    module = fit(agent(), rollouts(engine=engine))
    assert module.policy is not None
    assert all(parameter.requires_grad for parameter in module.policy.parameters())


def test_temperatures_must_agree(fit) -> None:
    with pytest.raises(ConfigurationError, match=r"model.temperature=1.0 must equal data.temperature=0.3"):
        fit(agent(), rollouts(temperature=0.3))


def test_a_reference_that_nobody_compares_with_is_refused(fit) -> None:
    with pytest.raises(
        ConfigurationError, match=r"model.reference is set, and objective PolicyGradient.*kl_coefficient is 0"
    ):
        fit(agent(reference=TINY), rollouts())


def test_more_context_than_the_model_has_positions_is_refused(fit) -> None:
    engine = ScriptedEngine()
    with pytest.raises(ConfigurationError, match=r"data.context_limit=300 is more than the model's 256 positions"):
        fit(agent(), rollouts(engine=engine, context_limit=300))
    assert engine.requests == []


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.")
def test_a_checkpoint_from_the_middle_of_a_collection_is_not_resumed(trainer, tmp_path) -> None:
    saver = L.pytorch.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    trainer(enable_checkpointing=True, callbacks=[saver]).fit(agent(), datamodule=rollouts(mini_batches=3))
    saved = tmp_path / "step=2.ckpt"
    trainer().test(
        agent(), datamodule=rollouts(), ckpt_path=saved, weights_only=False, verbose=False
    )  # but measured it is
    with pytest.raises(ConfigurationError, match="in the middle of a collection"):
        trainer(max_epochs=2).fit(agent(), datamodule=rollouts(mini_batches=3), ckpt_path=saved, weights_only=False)


def test_an_overfull_update_is_found_before_the_first_one_trains(fit) -> None:
    module = agent()
    with pytest.raises(ConfigurationError, match=r"token_budget=60 .* 2 rows over micro_batches=1 need \d+"):
        fit(module, rollouts(Countdown([1, 1, 4]), token_budget=60, context_limit=60, mini_batches=3, group_size=2))
    assert module.policy_version == 0


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_the_smallest_budget_that_is_accepted_trains_and_one_token_less_does_not(fit, mini_batches) -> None:
    def budget_of(tokens):
        return rollouts(
            Countdown([1] * 3), engine=ScriptedEngine(), group_size=4, context_limit=30, mini_batches=mini_batches,
            micro_batches=2, token_budget=tokens,
        )  # fmt: skip

    recorder = Recorder()
    fit(agent(), budget_of(10_000), callbacks=[recorder])
    need = max(int(lengths(batch).sum()) for batch in recorder.batches)
    assert need > 30
    module = fit(agent(), budget_of(need))
    assert module.policy_version == mini_batches
    with pytest.raises(ConfigurationError, match=f"token_budget={need - 1} "):
        fit(agent(), budget_of(need - 1))


def test_the_depth_in_force_survives_a_checkpoint() -> None:
    data, other = rollouts(), rollouts()
    data.rollout_budget.limit(2)
    other.load_state_dict(data.state_dict())
    assert (other.rollout_budget.max_turns, other.rollout_budget.ceiling) == (2, 4)


def test_when_every_group_fails_the_run_stops_with_the_reason(fit) -> None:
    def fails(task, attempt, text=None):
        raise OSError("the world ended")

    module = agent()
    with pytest.raises(RolloutError, match=r"all 3 groups of collection 0 failed.*the world ended"):
        fit(module, rollouts(Countdown(fails=fails), ScriptedEngine()))
    assert module.policy_version == 0
