"""Log-probabilities of the policy are the model's own, each at its own token."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    OPTConfig,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
)

from conftest import TINY
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.models import Pretrained, SmallLlama, check_head, load_tokenizer
from sorl_lightning.networks import PolicyNetwork, frozen
from sorl_lightning.padding_free import is_padding_free
from sorl_lightning.sharding import full_weights

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 64,
}  # fmt: skip

OPT = {"ffn_dim": 96, "word_embed_proj_dim": 64}


def build(config_class, **changes):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_class(**{**SIZES, **changes}), dtype=torch.float32).eval()


def plain(model, ids, temperature):
    """Log-probability and entropy of each token but the first, from full logits."""
    logits = model(input_ids=ids).logits[:, :-1].double() / temperature
    logprobs = logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, ids[:, 1:, None])[..., 0], entropy


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (LlamaConfig, {"tie_word_embeddings": True}),
        (LlamaConfig, {"tie_word_embeddings": False}),
        (Qwen2Config, {}),
        (Qwen3Config, {}),
        (GraniteConfig, {"logits_scaling": 8.0}),
        (CohereConfig, {"logit_scale": 0.25}),
    ],
)
@torch.no_grad()
def test_logprobs_are_the_models_own_at_their_own_token(config, changes, temperature) -> None:
    model = build(config, **changes)
    check_head(model)
    ids = torch.randint(0, 128, (3, 12), generator=torch.Generator().manual_seed(1))
    generated = torch.rand(3, 12, generator=torch.Generator().manual_seed(2)) < 0.5
    generated[2] = False
    positions = torch.arange(12).expand(3, 12)
    logprobs, entropy = PolicyNetwork(model)(ids, positions, generated, temperature)
    expected, expected_entropy = plain(model, ids, temperature)
    later = generated[:, 1:]
    torch.testing.assert_close(logprobs[:, 1:][later].double(), expected[later], rtol=0, atol=2e-6)
    torch.testing.assert_close(entropy[:, 1:][later].double(), expected_entropy[later], rtol=0, atol=5e-6)
    assert not logprobs[:, 1:][~later].any()
    assert not logprobs[:, 0].any()


def test_the_trained_token_is_the_masked_one_and_not_its_neighbour() -> None:
    """Tokens [10, 11, 12, 13], mask [0, 0, 1, 0]: token 12, at logit position 1 (verl #3287)."""
    model = build(LlamaConfig)
    ids = torch.tensor([[10, 11, 12, 13]])
    mask = torch.tensor([[False, False, True, False]])
    logprobs, _ = PolicyNetwork(model)(ids, torch.arange(4)[None], mask)
    expected = model(input_ids=ids).logits[0, 1].log_softmax(-1)[12]
    torch.testing.assert_close(logprobs, torch.tensor([[0.0, 0.0, float(expected.detach()), 0.0]]))


def test_padding_on_the_right_changes_nothing_and_padding_alone_reaches_every_parameter() -> None:
    network = PolicyNetwork(build(Qwen2Config))
    ids = torch.tensor([[5, 6, 7], [5, 6, 0]])
    mask = torch.tensor([[False, True, True], [False, True, False]])
    together, _ = network(ids, torch.arange(3).expand(2, 3), mask)
    alone, _ = network(ids[1:, :2], torch.arange(2)[None], mask[1:, :2])
    torch.testing.assert_close(together[1, :2], alone[0])
    nothing, _ = network(ids, torch.arange(3).expand(2, 3), torch.zeros(2, 3, dtype=torch.bool))
    nothing.sum().backward()
    missing = [name for name, parameter in network.named_parameters() if parameter.grad is None]
    assert missing in ([], ["model.lm_head.weight"])
    assert all(not parameter.grad.any() for parameter in network.parameters() if parameter.grad is not None)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (Gemma2Config, {}, "final_logit_softcapping"),
        (PhiConfig, {"num_key_value_heads": 2, "head_dim": 32}, "bias"),
    ],
)
def test_heads_that_chunks_cannot_follow_are_refused(config, changes, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PolicyNetwork(build(config, **changes))


def test_a_head_that_does_something_unknown_is_found_out() -> None:
    model = build(LlamaConfig)
    plain_forward = model.forward

    def squashed(*args, **kwargs):
        output = plain_forward(*args, **kwargs)
        output.logits = output.logits * 3.0 + 1.0
        return output

    model.forward = squashed
    with pytest.raises(ConfigurationError, match="after the head"):
        check_head(model)


def test_gpt2_style_names() -> None:
    config = GPT2Config(vocab_size=128, n_embd=64, n_layer=1, n_head=2, n_positions=32)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids = torch.arange(6)[None]
    logprobs, _ = PolicyNetwork(model)(ids, ids, torch.ones(1, 6, dtype=torch.bool))
    torch.testing.assert_close(logprobs[:, 1:].double(), plain(model, ids, 1.0)[0], rtol=0, atol=2e-6)


def test_a_small_llama_depends_on_its_seed_alone_and_loads_again(tmp_path) -> None:
    before = torch.random.get_rng_state()
    first, tokenizer = TINY.load()
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(5)
    second, _ = TINY.load()
    other, _ = SmallLlama(tokenizer="sorl:textworld", hidden_size=32, num_hidden_layers=1, seed=1).load()
    weight = [model.get_output_embeddings().weight for model in (first, second, other)]
    assert torch.equal(weight[0], weight[1])
    assert not torch.equal(weight[0], weight[2])
    first.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded, again = Pretrained(path=str(tmp_path)).load()
    assert torch.equal(loaded.get_output_embeddings().weight, weight[0])
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.chat_template == tokenizer.chat_template


def test_tied_weights_travel_once() -> None:
    model, _ = TINY.load()
    names = [name for name, _ in full_weights(model)]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_a_frozen_copy_stays_what_it_was() -> None:
    model, _ = TINY.load()
    copy = frozen(model)
    with torch.no_grad():
        model.get_output_embeddings().weight.add_(1.0)
    assert not torch.equal(copy.model.get_output_embeddings().weight, model.get_output_embeddings().weight)
    assert not any(parameter.requires_grad for parameter in copy.parameters())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: load_tokenizer("no/such/folder"), "no tokenizer at 'no/such/folder': there is no such folder"),
        (lambda: load_tokenizer("sorl:nothing"), "'sorl:nothing' does not ship with the package"),
        (lambda: SmallLlama(tokenizer="sorl:textworld", hidden_size=48).load(), "multiple of head_dim=32, got 48"),
    ],
)
def test_what_is_not_there(call, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        call()


@pytest.mark.parametrize(
    "model",
    [
        lambda: build(LlamaConfig, attention_dropout=0.5),
        lambda: build(SeedOssConfig, attention_dropout=0.5, residual_dropout=0.5),
        lambda: build(OPTConfig, **OPT, dropout=0.5, attention_dropout=0.5, activation_dropout=0.5, layerdrop=0.5),
    ],
    ids=["llama", "seed_oss", "opt"],
)
def test_dropout_is_off_in_training(model) -> None:
    network = PolicyNetwork(model())
    assert network.training
    assert is_padding_free(network.model)  # no draw of a dropout made joined rows differ
    ids = torch.arange(6)[None]
    mask = torch.ones(1, 6, dtype=torch.bool)
    first, second = (network(ids, ids, mask)[0] for _ in range(2))
    assert torch.equal(first, second)
    torch.testing.assert_close(first[:, 1:].double(), plain(network.model.eval(), ids, 1.0)[0], rtol=0, atol=2e-6)
