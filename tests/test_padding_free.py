"""Rows computed without their padding give what each gives alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
)

from sorl_lightning import padding_free
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.models import recompute_activations
from sorl_lightning.networks import PolicyNetwork
from sorl_lightning.padding_free import ATTENTION, is_padding_free, token_states

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = {
    "llama": LlamaConfig(**SIZES),
    "qwen2, half of its layers in windows": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=1
    ),
    "mistral, windows of 4 tokens": MistralConfig(**SIZES, sliding_window=4),
    "gpt2": GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64),
}
LENGTHS = [9, 1, 17, 2, 9, 5]


def network(name: str, dtype: torch.dtype = torch.float64, padded: bool = False) -> PolicyNetwork:
    torch.manual_seed(0)
    policy = PolicyNetwork(AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES[name]), dtype=dtype))
    if padded:
        policy.model.set_attn_implementation("sdpa")
    assert is_padding_free(policy.model) is not padded
    return policy


def rows(lengths: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Ragged rows with garbage after their last generated token; the odd ones open a turn in their middle."""
    ids = torch.randint(97, (len(lengths), max(lengths) + 3), generator=torch.Generator().manual_seed(1))
    generated = torch.zeros(ids.shape, dtype=torch.bool)
    for row, length in enumerate(lengths):
        generated[row, length - 1] = True
        generated[row, 1 : length // 2] = row % 2 == 1
    return ids, torch.arange(ids.shape[1]).expand(ids.shape), generated


@pytest.mark.parametrize("name", FAMILIES)
def test_every_row_gets_the_numbers_and_gradients_that_it_gets_alone(name: str) -> None:
    policy = network(name)
    ids, positions, generated = rows(LENGTHS)
    logprobs, entropy = policy(ids, positions, generated)
    (logprobs.sum() + 0.3 * entropy.sum()).backward()
    together = [p.grad.clone() for p in policy.parameters()]
    policy.zero_grad()
    plain = network(name, padded=True)
    for row, length in enumerate(LENGTHS):
        part = (ids[row : row + 1, :length], positions[row : row + 1, :length], generated[row : row + 1, :length])
        if length == 1:
            assert not logprobs[row].any()
            continue
        alone = plain(*part)
        torch.testing.assert_close(logprobs[row, :length], alone[0][0], rtol=0, atol=1e-12)
        torch.testing.assert_close(entropy[row, :length], alone[1][0], rtol=0, atol=1e-12)
        (alone[0].sum() + 0.3 * alone[1].sum()).backward()
    for grad, parameter in zip(together, plain.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad, rtol=1e-10, atol=1e-12)


def test_padding_is_not_computed() -> None:
    policy, seen = network("llama"), []
    policy.model.base_model.layers[0].mlp.register_forward_hook(lambda _, __, output: seen.append(output.shape))
    ids, positions, generated = rows(LENGTHS)
    policy(ids, positions, generated)
    assert seen == [(1, sum(LENGTHS), 32)]
    policy(ids, positions, generated & False)  # nothing to train: a token a row, and two rows open with the same
    assert seen[1] == (1, len(LENGTHS) - 1, 32)


def test_recomputed_activations_know_their_rows() -> None:
    plain, recomputing = network("llama"), network("llama")
    recompute_activations(recomputing.model)
    for policy in (plain, recomputing):
        policy(*rows(LENGTHS))[0].sum().backward()
    for left, right in zip(plain.parameters(), recomputing.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)


def test_a_model_with_a_state_of_its_own_keeps_its_padding() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MambaConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1))
    assert not is_padding_free(PolicyNetwork(model).model)


def test_a_model_whose_layers_drop_the_rows_keeps_its_padding() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES["llama"]))
    for layer in model.model.layers:  # as a model would that passes no keywords on
        forward = layer.self_attn.forward
        layer.self_attn.forward = lambda joined=None, forward=forward, **settings: forward(**settings)
    policy = PolicyNetwork(model)
    assert not is_padding_free(policy.model)
    assert policy.model.config._attn_implementation == "sdpa"
    ids, positions, generated = rows(LENGTHS)
    assert token_states(model.base_model, ids, positions, generated).kept.all()


@pytest.mark.parametrize("positions", [2, 8, 24])
def test_a_model_of_few_positions_is_asked_about_no_more(positions: int) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=positions)
    policy = PolicyNetwork(AutoModelForCausalLM.from_config(config, dtype=torch.float64))
    assert is_padding_free(policy.model) is (positions > 2)
    ids = torch.tensor([[5, 7, 9, 9, 3, 1], [5, 7, 2, 2, 2, 2]])[:, :positions]
    logprobs, _ = policy(ids, torch.arange(ids.shape[1]).expand(ids.shape), torch.ones(ids.shape, dtype=torch.bool))
    logits = policy.model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    torch.testing.assert_close(logprobs[:, 1:], logits.gather(-1, ids[:, 1:, None])[..., 0], rtol=0, atol=1e-12)


def test_a_model_that_draws_random_numbers_in_training_is_refused() -> None:
    sizes = {**SIZES, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    with pytest.raises(ConfigurationError, match="MixtralForCausalLM draws random numbers in training"):
        PolicyNetwork(AutoModelForCausalLM.from_config(MixtralConfig(**sizes, router_jitter_noise=0.1)))
    PolicyNetwork(AutoModelForCausalLM.from_config(MixtralConfig(**sizes)))


def test_a_model_whose_tokens_see_what_follows_is_refused() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES["llama"]), attn_implementation="eager")
    forward = model.model.embed_tokens.forward
    model.model.embed_tokens.forward = lambda ids: forward(ids) + forward(ids).mean(1, keepdim=True)
    with pytest.raises(ConfigurationError, match="LlamaForCausalLM computes a token otherwise where others follow"):
        PolicyNetwork(model)


def test_a_model_that_hides_its_hidden_states_is_refused() -> None:
    sizes = {**SIZES, "head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2}
    with pytest.raises(ConfigurationError, match="Llama4ForCausalLM does not show its last hidden states"):
        PolicyNetwork(Llama4ForCausalLM(Llama4TextConfig(**sizes)))


def test_outside_of_joined_rows_attention_is_the_usual(tmp_path) -> None:
    """Generation with a cache and a mask, and the saved configuration, are those of any model."""
    policy = network("mistral, windows of 4 tokens", dtype=torch.float32)
    usual = network("mistral, windows of 4 tokens", dtype=torch.float32, padded=True)
    ids = torch.arange(24).reshape(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    assert policy.model.config._attn_implementation == ATTENTION
    settings = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(policy.model.generate(ids, **settings), usual.model.generate(ids, **settings))
    policy.model.save_pretrained(tmp_path)
    assert ATTENTION not in (tmp_path / "config.json").read_text()


def families() -> tuple[Tensor, Tensor, Tensor]:
    """Siblings with a long prompt, after a start that all but one row have, some equal, some longer than the prompt."""
    generator = torch.Generator().manual_seed(3)
    start, *prompts = (torch.randint(97, (size,), generator=generator) for size in (18, 20, 17))
    ids = torch.randint(97, (8, 64), generator=generator)
    generated = torch.zeros(ids.shape, dtype=torch.bool)
    for row, (prompt, own) in enumerate([(0, 3), (0, 25), (0, 1), (1, 7), (1, 7), (1, 20), (0, 3)]):
        opening = torch.cat([start, prompts[prompt]])
        ids[row, : len(opening)] = opening
        generated[row, len(opening)] = generated[row, len(opening) + own - 1] = True
    ids[6] = ids[0]
    generated[7, 5:9] = True
    return ids, torch.arange(64).expand(ids.shape), generated


@pytest.mark.parametrize("spared", [0, padding_free.SPARED_BY_A_MASK])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_rows_open_with_is_computed_once_and_gives_the_same(name: str, spared: int, monkeypatch) -> None:
    """With masks wherever one spares a query, and with none at these lengths."""
    monkeypatch.setattr(padding_free, "SPARED_BY_A_MASK", spared)
    policy, plain = network(name), network(name, padded=True)
    head = torch.nn.Sequential(torch.nn.Linear(32, 1, dtype=torch.float64), torch.nn.Flatten(0))
    seen: list[int] = []
    policy.model.base_model.register_forward_hook(lambda _, __, output: seen.append(output.last_hidden_state.shape[1]))
    ids, positions, generated = families()
    for model in (policy, plain):
        logprobs, entropy, values = model(ids, positions, generated, value_head=head)
        (logprobs.sum() + 0.3 * entropy.sum() + (values * generated).square().sum()).backward()
        model.answers = (logprobs, entropy, values * generated)
    assert seen == [18 + (20 + 3 + 25 + 1) + (17 + 7 + 7 + 20) + 9]
    torch.testing.assert_close(policy.answers, plain.answers, rtol=0, atol=1e-12)
    # Norms of Llama and its kin are computed in float32, and gradients of openings are sums over rows.
    tolerance = 1e-12 if name == "gpt2" else 1e-6
    for left, right in zip(policy.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad, rtol=0, atol=tolerance)


def test_recomputed_activations_know_what_rows_open_with() -> None:
    plain, recomputing = network("llama"), network("llama")
    recompute_activations(recomputing.model)
    for policy in (plain, recomputing):
        policy(*families())[0].sum().backward()
    for left, right in zip(plain.parameters(), recomputing.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)
