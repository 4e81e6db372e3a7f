"""Engines that play from what the environment knows."""

from __future__ import annotations

import asyncio
import collections
import math
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sorl_lightning.errors import ConfigurationError, RolloutError
from sorl_lightning.rollout.engine import GenerationRequest, RolloutEngine, TrajectoryKey
from sorl_lightning.rollout.engines.expert import ExpertEngine
from sorl_lightning.rollout.engines.random import RandomEngine

STOP = 2


class Door:
    """An environment of one state."""

    def tasks(self, split):
        return []

    def reset(self, task):
        return []

    def step(self, text):
        raise NotImplementedError

    def expert_action(self):
        return "open door"

    def admissible_actions(self):
        return ("close door", "look", "open door")


class Wall:
    """An environment that knows nothing."""

    def tasks(self, split):
        return []

    def reset(self, task):
        return []

    def step(self, text):
        raise NotImplementedError


@pytest.fixture
def tokenizer():
    words = {"<pad>": 0, "<bos>": 1, "<eos>": STOP, "open": 3, "door": 4, "close": 5, "look": 6, "<unk>": 7}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")


@pytest.fixture
def request_of_door():
    return GenerationRequest(
        trajectory=TrajectoryKey(0, 0),
        prompt_ids=(1,),
        max_tokens=8,
        stop_token_ids=(STOP, 0),
        temperature=1.0,
        seed=3,
        environment=Door(),
    )


def attached(engine, tokenizer):
    assert isinstance(engine, RolloutEngine)
    shape = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
    engine.attach(LlamaForCausalLM(LlamaConfig(vocab_size=8, **shape)), tokenizer)
    return engine


def generate(engine, request):
    return asyncio.run(engine.generate(request))


def test_the_expert_writes_its_action_and_stops(tokenizer, request_of_door):
    completion = generate(attached(ExpertEngine(), tokenizer), request_of_door)
    assert completion.token_ids == (3, 4, STOP)
    assert completion.logprobs == (0.0, 0.0, 0.0)
    assert completion.finish_reason == "stop"
    assert completion.policy_version == (0, 0, 0)


def test_turns_carry_the_version_last_loaded(tokenizer, request_of_door):
    engine = attached(ExpertEngine(), tokenizer)
    engine.load_weights(iter(()), version=5)
    assert generate(engine, request_of_door).policy_version == (5, 5, 5)


def test_an_action_is_never_cut_short(tokenizer, request_of_door):
    engine = attached(ExpertEngine(), tokenizer)
    assert len(generate(engine, replace(request_of_door, max_tokens=3)).token_ids) == 3
    with pytest.raises(RolloutError, match="'open door' and its stop token are 3 tokens, max_tokens is 2"):
        generate(engine, replace(request_of_door, max_tokens=2))


@pytest.mark.parametrize(("engine", "ability"), [(ExpertEngine, "expert_action"), (RandomEngine, "admissible_actions")])
def test_an_environment_without_the_ability_is_named(engine, ability, tokenizer, request_of_door):
    with pytest.raises(ConfigurationError, match=f"with {ability}, and Wall has none"):
        generate(attached(engine(), tokenizer), replace(request_of_door, environment=Wall()))


def test_what_is_missing_is_named(tokenizer, request_of_door):
    with pytest.raises(ConfigurationError, match="call attach before"):
        generate(ExpertEngine(), request_of_door)
    with pytest.raises(ConfigurationError, match="stop_token_ids is empty"):
        generate(attached(ExpertEngine(), tokenizer), replace(request_of_door, stop_token_ids=()))


def test_chance_is_uniform_and_depends_on_the_seed_alone(tokenizer, request_of_door):
    engine = attached(RandomEngine(), tokenizer)
    requests = [replace(request_of_door, seed=seed) for seed in range(300)]
    completions = [generate(engine, request) for request in requests]
    assert [generate(engine, request) for request in reversed(requests)] == completions[::-1]
    counts = collections.Counter(completion.token_ids for completion in completions)
    assert counts.keys() == {(3, 4, STOP), (5, 4, STOP), (6, STOP)}
    assert min(counts.values()) > 70
    assert all(math.isclose(sum(completion.logprobs), -math.log(3)) for completion in completions)


def test_mistakes_are_as_frequent_and_as_probable_as_said(tokenizer) -> None:
    class Door:
        def expert_action(self) -> str:
            return "open door"

        def admissible_actions(self) -> list[str]:
            return ["knock", "look", "open door", "wait"]

    engine = ExpertEngine(mistakes=0.4)
    engine.attach(None, tokenizer)  # type: ignore[arg-type]
    counts: dict[str, int] = {}
    for seed in range(2000):
        request = GenerationRequest(
            trajectory=TrajectoryKey(0, 0),
            prompt_ids=(1,),
            max_tokens=8,
            stop_token_ids=(3,),
            temperature=1.0,
            seed=seed,
            environment=Door(),  # type: ignore[arg-type]
        )
        text, logprob = engine.choose(request)
        assert math.exp(logprob) == pytest.approx(0.7 if text == "open door" else 0.1)
        counts[text] = counts.get(text, 0) + 1
    assert counts["open door"] == pytest.approx(1400, abs=80)
    assert all(counts[other] == pytest.approx(200, abs=50) for other in ("knock", "look", "wait"))


@pytest.mark.parametrize("mistakes", [-0.1, 1.1])
def test_mistakes_are_a_probability(mistakes) -> None:
    with pytest.raises(ConfigurationError, match=r"mistakes must be in \[0, 1\]"):
        ExpertEngine(mistakes=mistakes)
