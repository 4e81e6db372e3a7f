"""Adapters train, travel merged, and are all that a checkpoint or an export holds."""

from __future__ import annotations

import asyncio

import lightning as L
import pytest
import torch

from conftest import TINY, agent
from doubles import Countdown, ScriptedEngine
from sorl_lightning.callbacks import ClippingTriggeredNormalization, HFExport
from sorl_lightning.datamodule import RolloutDataModule
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.lora import LoRA
from sorl_lightning.models import Pretrained
from sorl_lightning.networks import PolicyNetwork
from sorl_lightning.objectives import PolicyGradient
from sorl_lightning.rollout.engine import GenerationRequest, TrajectoryKey
from sorl_lightning.rollout.engines import LocalEngine
from sorl_lightning.sharding import full_weights

PeftModel = pytest.importorskip("peft").PeftModel


def adapted(tmp_path, **settings):
    """Adapters on a tiny model in a folder, as Hub models are."""
    model, tokenizer = TINY.load()
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return LoRA(base=Pretrained(path=str(tmp_path / "base")), rank=4, **settings)


def data(engine=None, **settings):
    return RolloutDataModule(Countdown(), engine, tasks_per_collection=3, group_size=4, max_turns=4, max_tokens=4,
                             context_limit=128, **settings)  # fmt: skip


def logprobs(model, ids):
    return PolicyNetwork(model.eval())(ids, torch.arange(ids.shape[1])[None], torch.ones_like(ids, dtype=torch.bool))[0]


def perturbed(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return model


IDS = torch.arange(300, 312)[None]


def test_adapters_start_as_nothing_and_are_all_that_trains(tmp_path) -> None:
    source = adapted(tmp_path)
    state = torch.random.get_rng_state()
    model, _ = source.load()
    assert torch.equal(state, torch.random.get_rng_state())
    torch.testing.assert_close(logprobs(model, IDS), logprobs(source.base.load()[0], IDS))
    assert {name.split(".lora_")[1][0] for name, p in model.named_parameters() if p.requires_grad} == {"A", "B"}
    again, _ = source.load()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_merged_weights_are_the_adapted_model_under_plain_names(tmp_path) -> None:
    source = adapted(tmp_path)
    model = perturbed(source.load()[0])
    plain, _ = source.base.load()
    before = logprobs(plain, IDS)
    weights = dict(full_weights(model))
    assert list(weights) == [name for name, _ in plain.named_parameters()]
    plain.load_state_dict(weights, strict=False)
    assert (logprobs(plain, IDS) - before).abs().max() > 0.01
    torch.testing.assert_close(logprobs(plain, IDS), logprobs(model, IDS), rtol=0, atol=1e-5)


def test_the_engine_samples_from_the_adapted_policy(tmp_path) -> None:
    model, tokenizer = adapted(tmp_path).load()
    perturbed(model)
    engine, key = LocalEngine(), TrajectoryKey(0, 0)
    engine.attach(model, tokenizer)
    engine.load_weights(full_weights(model), 3)
    engine.open(key)
    request = GenerationRequest(
        trajectory=key, prompt_ids=(300, 301), max_tokens=6, stop_token_ids=(0,), temperature=1.0, seed=1,
        environment=Countdown(),
    )  # fmt: skip
    completion = asyncio.run(engine.generate(request))
    ids = torch.tensor([[300, 301, *completion.token_ids]])
    torch.testing.assert_close(logprobs(model, ids)[0, 2:].tolist(), list(completion.logprobs), rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")  # peft's own wrapper
def test_a_run_trains_saves_resumes_and_exports_adapters_alone(trainer, tmp_path) -> None:
    source = adapted(tmp_path)
    optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)  # noqa: E731

    def run(epochs, resume=None, callbacks=()):
        module = agent(policy=source, optimizer=optimizer, objective=PolicyGradient(ratio="token"))
        saver = L.pytorch.callbacks.ModelCheckpoint(tmp_path, save_last=True, save_on_train_epoch_end=True)
        runner = trainer(max_epochs=epochs, enable_checkpointing=True, callbacks=[saver, *callbacks])
        runner.fit(module, datamodule=data(mini_batches=2), ckpt_path=resume, weights_only=False)
        return dict(module.named_parameters())

    export = HFExport(str(tmp_path / "export"))
    whole = run(4, callbacks=[export, ClippingTriggeredNormalization()])
    names = torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"]
    assert names
    assert all(".lora_" in name for name in names)
    run(2, callbacks=[ClippingTriggeredNormalization()])
    resumed = run(4, tmp_path / "last.ckpt", callbacks=[ClippingTriggeredNormalization()])
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    fresh = dict(source.load()[0].named_parameters())
    changed = {name for name in fresh if not torch.equal(fresh[name], whole[f"policy.model.{name}"])}
    assert changed == {name for name in fresh if "lora_" in name}
    size = sum(file.stat().st_size for file in (tmp_path / "export").glob("*.safetensors"))
    assert size < 0.6 * (tmp_path / "base/model.safetensors").stat().st_size
    loaded, _ = LoRA(base=source.base, adapters=str(tmp_path / "export")).load()
    weights = dict(loaded.named_parameters())
    for name in changed:
        assert torch.equal(weights[name], whole[f"policy.model.{name}"])
        assert weights[name].requires_grad
    peft_own = PeftModel.from_pretrained(source.base.load()[0], tmp_path / "export").base_model.model
    torch.testing.assert_close(logprobs(peft_own, IDS), logprobs(loaded, IDS), rtol=0, atol=1e-5)
    with pytest.raises(ConfigurationError, match=r"holds adapters alone: take the source sorl_lightning\.lora\.LoRA"):
        Pretrained(path=str(tmp_path / "export")).load()


def test_ratios_are_one_on_fresh_rollouts(fit, tmp_path) -> None:
    seen = []

    class Watch(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            seen.append(float(trainer.callback_metrics["train/ratio_max"]))

    fit(agent(policy=adapted(tmp_path)), data(), callbacks=[Watch()], max_epochs=3)
    assert seen == pytest.approx([1.0] * 3, abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"rank": 0}, "rank >= 1"), ({"alpha": 0.0}, "alpha > 0"), ({"target_modules": ["nothing"]}, "target_modules")],
)
def test_settings_that_cannot_work(tmp_path, settings, message) -> None:
    source = adapted(tmp_path)
    with pytest.raises(ConfigurationError, match=message):
        LoRA(**{"base": source.base, **settings}).load()


def test_scripted_rollouts_train_adapters_too(fit, tmp_path) -> None:
    source = adapted(tmp_path, target_modules=["q_proj"])
    before = dict(source.load()[0].named_parameters())
    module = fit(agent(policy=source), data(ScriptedEngine(), micro_batches=5))
    moved = {name for name, now in module.policy_model.named_parameters() if not torch.equal(now, before[name])}
    assert moved
    assert all("lora_" in name for name in moved)
