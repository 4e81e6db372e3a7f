"""``sorl export``: the folder gives the log-probabilities of the checkpoint, for full weights and for adapters."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import TINY
from served import real_server
from sorl_lightning.cli import main
from sorl_lightning.models import Pretrained
from sorl_lightning.networks import PolicyNetwork
from sorl_lightning.rollout.vllm.fleet import Fleet
from sorl_lightning.rollout.vllm.probe import largest_difference, probe_request

IDS = torch.arange(300, 340)[None]
PLAIN = {
    "class_path": "sorl_lightning.models.SmallLlama",
    "init_args": {"tokenizer": "sorl:textworld", "hidden_size": 32, "num_hidden_layers": 1, "context_length": 256},
}


def train(folder: Path, policy: dict) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run of two updates; its checkpoint, and the weights in it."""
    config = {
        "trainer": {"max_epochs": 2, "accelerator": "cpu", "devices": 1, "default_root_dir": str(folder),
                    "enable_progress_bar": False, "enable_model_summary": False},
        "model": {"policy": policy, "objective": {"class_path": "sorl_lightning.objectives.PolicyGradient"},
                  "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 1.0}}},
        "data": {"environment": {"class_path": "doubles.Countdown"}, "engine": {"class_path": "doubles.ScriptedEngine"},
                 "tasks_per_collection": 2, "group_size": 4, "max_turns": 2, "max_tokens": 4},
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    main(["fit", "--config", str(folder / "run.yaml"), "--trainer.limit_val_batches", "0"])
    (checkpoint,) = folder.rglob("last.ckpt")
    weights = torch.load(checkpoint, weights_only=False)["state_dict"]
    return checkpoint, weights


def logprobs(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return PolicyNetwork(model.eval())(IDS, torch.arange(IDS.shape[1])[None], torch.ones_like(IDS) > 0)[0]


def test_a_checkpoint_becomes_a_folder_that_transformers_loads(tmp_path, capsys) -> None:
    checkpoint, weights = train(tmp_path, PLAIN)
    target = tmp_path / "policy"
    main(["export", str(checkpoint), str(target)])
    assert "after 2 optimiser steps" in capsys.readouterr().out
    expected = TINY.load()[0]
    before = logprobs(expected)
    expected.load_state_dict({name.removeprefix("policy.model."): weight for name, weight in weights.items()})
    found = logprobs(AutoModelForCausalLM.from_pretrained(target))
    assert (found - logprobs(expected)).abs().max() <= 1e-6
    assert (found - before).abs().max() > 1e-4
    assert AutoTokenizer.from_pretrained(target).chat_template == TINY.load()[1].chat_template
    assert {"config.json", "generation_config.json", "model.safetensors", "README.md"} <= {
        p.name for p in target.iterdir()
    }
    card = (target / "README.md").read_text()
    assert "2 optimiser steps" in card
    recipe = yaml.safe_load(card.partition("```yaml\n")[2].partition("```")[0])
    assert recipe["model"]["optimizer"]["init_args"]["lr"] == 1.0
    with pytest.raises(SystemExit, match="is there already"):
        main(["export", str(checkpoint), str(target)])


def adapted(folder: Path) -> dict:
    """A policy with adapters on a model in ``folder``."""
    model, tokenizer = TINY.load()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    base = {"class_path": "sorl_lightning.models.Pretrained", "init_args": {"path": str(folder)}}
    return {"class_path": "sorl_lightning.lora.LoRA", "init_args": {"base": base, "rank": 4}}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")  # peft's own wrapper
def test_adapters_are_exported_alone_or_merged(tmp_path) -> None:
    peft = pytest.importorskip("peft")
    checkpoint, _ = train(tmp_path, adapted(tmp_path / "base"))
    main(["export", str(checkpoint), str(tmp_path / "adapters")])
    main(["export", str(checkpoint), str(tmp_path / "merged"), "--merge", "true"])
    alone = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapters")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (logprobs(merged) - logprobs(alone.base_model.model)).abs().max() <= 1e-6
    assert (logprobs(merged) - logprobs(Pretrained(path=str(tmp_path / "base")).load()[0])).abs().max() > 1e-5
    assert "AutoPeftModelForCausalLM" in (tmp_path / "adapters/README.md").read_text()
    assert "AutoPeftModelForCausalLM" not in (tmp_path / "merged/README.md").read_text()


def in_vllm(folder: Path) -> float:
    """Largest difference of log-probabilities between a folder in vLLM and in transformers, nats."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with real_server(model, tokenizer, exported=folder) as (_, url):
        fleet = Fleet([url], "policy", "policy", concurrency=1, request_timeout=600.0, attempts=2)
        with contextlib.closing(fleet):
            fleet.meet(60.0)
            (server,) = fleet.servers
            request = probe_request(model.config.vocab_size, server.context_limit)
            answer = fleet.loop.run(fleet.turn(server, request, "exported", probe=True))
    assert len(answer.prompt_logprobs) == len(request.prompt_ids) - 1
    return largest_difference(model.eval(), request, answer)


@pytest.mark.vllm
def test_vllm_serves_what_was_exported(tmp_path) -> None:
    checkpoint, weights = train(tmp_path, PLAIN)
    main(["export", str(checkpoint), str(tmp_path / "policy")])
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "policy").state_dict()
    for name, weight in weights.items():  # of the policy alone: all that the checkpoint holds
        torch.testing.assert_close(exported[name.removeprefix("policy.model.")], weight, rtol=0, atol=0)
    assert in_vllm(tmp_path / "policy") <= 5e-5


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")
def test_vllm_serves_merged_adapters(tmp_path) -> None:
    pytest.importorskip("peft")
    checkpoint, _ = train(tmp_path, adapted(tmp_path / "base"))
    main(["export", str(checkpoint), str(tmp_path / "merged"), "--merge", "true"])
    assert in_vllm(tmp_path / "merged") <= 5e-5


def test_what_cannot_be_exported_is_one_sentence(tmp_path) -> None:
    target = str(tmp_path / "policy")
    with pytest.raises(SystemExit, match="cannot be read"):
        main(["export", str(tmp_path / "none.ckpt"), target])
    torch.save({"weights": 1}, tmp_path / "foreign.ckpt")
    with pytest.raises(SystemExit, match="is not of a run of sorl"):
        main(["export", str(tmp_path / "foreign.ckpt"), target])
    torch.save({"state_dict": {"policy.model.x": torch.ones(1)}, "policy_version": 1}, tmp_path / "other.ckpt")
    with pytest.raises(SystemExit, match=r"no config\.yaml above"):
        main(["export", str(tmp_path / "other.ckpt"), target])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model": {"policy": PLAIN}}))
    with pytest.raises(SystemExit, match="of another model"):
        main(["export", str(tmp_path / "other.ckpt"), target])
    with pytest.raises(SystemExit, match="a file a rank"):
        main(["export", str(tmp_path), target])
