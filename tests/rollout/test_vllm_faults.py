"""What the trainer does when a server misbehaves, shown with a fake one that misbehaves on request."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import time
import urllib.request
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engines_vllm import ask
from torch import Tensor

from conftest import agent
from doubles import Countdown
from served import CONTEXT, push, request, scores, tiny
from sorl_lightning.datamodule import RolloutDataModule
from sorl_lightning.errors import ConfigurationError, EngineOutage, RolloutError
from sorl_lightning.rollout.engines import VLLMEngine
from sorl_lightning.rollout.vllm.client import ServerError, words
from sorl_lightning.rollout.vllm.transports import DiskTransport, GlooTransport, buckets
from sorl_lightning.rollout.vllm.wire import prompt_logprobs_of
from sorl_lightning.sharding import full_weights
from sorl_lightning.testing.fake_vllm import FakeVLLM
from sorl_lightning.types import Completion

GENERATE = "/inference/v1/generate"


@pytest.fixture
def fake() -> Iterator[FakeVLLM]:
    with FakeVLLM(tiny(True), CONTEXT) as server:
        yield server


@pytest.fixture
def engine(fake: FakeVLLM) -> Iterator[VLLMEngine]:
    engine = connect(fake)
    yield engine
    engine.close()


def connect(*fakes: FakeVLLM, **settings: Any) -> VLLMEngine:
    defaults = {"attempts": 2, "request_timeout": 5.0, "push_timeout": 5.0, "outage_timeout": 0.5, "probe_every": 0}
    engine = VLLMEngine([fake.url for fake in fakes], **{**defaults, **settings})
    engine.attach(tiny(True))
    return engine


def one(engine: VLLMEngine, **changes: Any) -> Completion:
    return ask(engine, [request((1, 2, 3), **changes)])[0]


# Turns


def test_a_server_error_is_tried_again_and_gives_the_same_turn(fake: FakeVLLM, engine: VLLMEngine) -> None:
    push(engine, tiny(True), 0)
    expected = one(engine)
    fake.fail(GENERATE, status=503)
    assert one(engine) == expected
    assert [route for route, _ in fake.requests].count(GENERATE) == 4  # one GET asked whether the route is open


def test_errors_that_stay_end_in_the_servers_words(fake: FakeVLLM, engine: VLLMEngine) -> None:
    push(engine, tiny(True), 0)
    fake.fail(GENERATE, times=2, status=500, text="EngineCore encountered an issue")
    with pytest.raises(EngineOutage, match=r"500 .*EngineCore encountered an issue"):
        one(engine)


def test_a_refusal_is_not_repeated(fake: FakeVLLM, engine: VLLMEngine) -> None:
    push(engine, tiny(True), 0)
    fake.fail(GENERATE, status=400, text="token id 9999 is out of vocabulary")
    with pytest.raises(ServerError, match="token id 9999 is out of vocabulary") as caught:
        one(engine)
    assert not isinstance(caught.value, EngineOutage)
    one(engine)


def test_a_hanging_turn_ends_with_its_timeout(fake: FakeVLLM) -> None:
    engine = connect(fake, request_timeout=0.3, attempts=1)
    push(engine, tiny(True), 0)
    fake.fail(GENERATE, hang=30.0)
    start = time.perf_counter()
    with pytest.raises(EngineOutage, match=r"did not answer /inference/v1/generate within 0\.3 s"):
        one(engine)
    assert time.perf_counter() - start < 10
    engine.close()


def without_logprobs(answer: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [{**answer["choices"][0], "logprobs": None}]}


def changed(**fields: Any) -> Any:
    return lambda answer: {"choices": [{**answer["choices"][0], **fields}]}


def with_nan(answer: dict[str, Any]) -> dict[str, Any]:
    answer["choices"][0]["logprobs"]["content"][2]["logprob"] = math.nan
    return answer


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_nan, "no finite numbers"),
        (without_logprobs, "without its tokens and log-probabilities"),
        (changed(token_ids=[1, 2, 3]), "3 tokens and 8 log-probabilities"),
        (changed(weight_versions=[{"version": "x:0", "start": 0, "end": 3}]), "weight versions of 3 tokens for 8"),
        (changed(finish_reason="tired"), "unknown reason 'tired'"),
        (lambda answer: {"choices": []}, "without its tokens"),
    ],
    ids=["nan", "no-logprobs", "wrong-length", "short-versions", "finish-reason", "no-choice"],
)
def test_what_is_no_turn_is_refused(fake: FakeVLLM, engine: VLLMEngine, change: Any, words: str) -> None:
    push(engine, tiny(True), 0)
    fake.fail(GENERATE, change=change)
    with pytest.raises(RolloutError, match=words):
        one(engine)


def test_an_aborted_turn_is_asked_for_again(fake: FakeVLLM, engine: VLLMEngine) -> None:
    push(engine, tiny(True), 0)
    expected = one(engine)
    fake.fail(GENERATE, change=changed(finish_reason="abort"))
    assert one(engine) == expected


def test_tokens_of_weights_that_nobody_pushed_are_never_returned(fake: FakeVLLM, engine: VLLMEngine) -> None:
    push(engine, tiny(True), 0)
    fake.weight_version = "default"  # as after a restart
    with pytest.raises(EngineOutage, match="weights 'default', which this run has not pushed"):
        one(engine)


def test_completions_serve_where_the_generate_route_is_closed() -> None:
    with FakeVLLM(tiny(True), CONTEXT, generate=False) as fake, FakeVLLM(tiny(True), CONTEXT) as whole:
        turns = []
        for server in (fake, whole):
            engine = connect(server, probe_every=1)
            push(engine, tiny(True), 3)
            turns.append(one(engine))
            server.weight_version = "default"
            with pytest.raises(EngineOutage, match="has not pushed"):
                one(engine)
            engine.close()
        assert turns[0] == turns[1]
        assert "/v1/completions" in [route for route, _ in fake.requests]


def test_what_a_request_says(fake: FakeVLLM, engine: VLLMEngine) -> None:
    push(engine, tiny(True), 7)
    one(engine, stop_token_ids=(3, 4), temperature=0.5, seed=11, max_tokens=5)
    body = fake.requests[-1][1]
    salt = body.pop("cache_salt")
    assert salt.endswith(":7")
    assert body == {
        "model": "policy",
        "token_ids": [1, 2, 3],
        "sampling_params": {
            "max_tokens": 5, "temperature": 0.5, "seed": 11, "stop_token_ids": [3, 4], "ignore_eos": True,
            "logprobs": 0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "detokenize": False,
        },
    }  # fmt: skip


def test_in_flight_requests_are_bounded(fake: FakeVLLM) -> None:
    engine = connect(fake, concurrency=3)
    push(engine, tiny(True), 0)
    running, most = 0, 0
    sample = fake._turn

    async def counted(*arguments: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            return await sample(*arguments)
        finally:
            running -= 1

    fake._turn = counted
    ask(engine, [request((1, 2), key=key, max_tokens=1) for key in range(40)])
    assert most == 3
    engine.close()


def test_trajectories_stay_with_their_server_and_share_them_evenly() -> None:
    with FakeVLLM(tiny(True), CONTEXT) as first, FakeVLLM(tiny(True), CONTEXT) as second:
        engine = connect(first, second)
        push(engine, tiny(True), 0)
        asked = [request((1, key), key=key, max_tokens=1) for key in range(6)]

        async def two_turns() -> None:
            for each in asked:
                engine.open(each.trajectory)
            for _ in range(2):
                await asyncio.gather(*(engine.generate(each) for each in asked))

        asyncio.run(two_turns())
        seen = [
            sorted(body["token_ids"][1] for _, body in fake.requests if body.get("token_ids"))
            for fake in (first, second)
        ]
        assert seen == [[0, 0, 2, 2, 4, 4], [1, 1, 3, 3, 5, 5]]
        assert first.weight_version == second.weight_version
        engine.close()


# Weights


@pytest.mark.parametrize("route", ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update"])
def test_a_hung_push_raises_in_time_and_the_next_succeeds(fake: FakeVLLM, route: str) -> None:
    engine = connect(fake, push_timeout=0.6)
    push(engine, tiny(True), 0)
    fake.fail(route, hang=2.0)
    start = time.perf_counter()
    with pytest.raises(EngineOutage, match=f":1 were not pushed: .*did not answer {route}.* within"):
        push(engine, tiny(True, seed=1), 1)
    assert time.perf_counter() - start < 1.9
    with pytest.raises(RuntimeError, match="no weights"):
        one(engine)
    time.sleep(2.0)  # the server gets over it
    engine.push_timeout = engine._push.timeout = 5.0
    push(engine, tiny(True, seed=2), 1)
    turn = one(engine)
    assert turn.policy_version == (1,) * 8
    own = scores(tiny(True, seed=2), (1, 2, 3), turn.token_ids, 1.0)
    assert (
        own.gather(-1, torch.tensor(turn.token_ids)[:, None])[:, 0] - torch.tensor(turn.logprobs)
    ).abs().max() < 1e-5
    engine.close()


def test_an_error_in_a_push_shows_the_servers_words_and_does_not_resume(fake: FakeVLLM, engine: VLLMEngine) -> None:
    push(engine, tiny(True), 0)
    fake.fail("/update_weights", status=500, text="no space left on device")
    before = len(fake.requests)
    with pytest.raises(EngineOutage, match="500 to /update_weights: no space left on device"):
        push(engine, tiny(True), 1)
    assert "/resume" not in [route for route, _ in fake.requests[before:]]
    push(engine, tiny(True), 1)
    assert one(engine).policy_version == (1,) * 8


def test_a_broadcast_that_nobody_joins_ends_with_the_servers_error() -> None:
    with FakeVLLM(tiny(True), CONTEXT, backend="gloo") as fake:
        engine = connect(fake, transport=GlooTransport())
        push(engine, tiny(True), 0)
        fake.fail("/update_weights", status=500, text="out of memory")
        start = time.perf_counter()
        with pytest.raises(EngineOutage, match="out of memory"):
            push(engine, tiny(True), 1)
        assert time.perf_counter() - start < 4
        push(engine, tiny(True), 1)
        assert one(engine).policy_version == (1,) * 8
        engine.close()


def test_a_server_that_keeps_old_weights_stops_the_run(fake: FakeVLLM) -> None:
    engine = connect(fake, probe_every=1)
    policy = tiny(True)
    engine.attach(policy)
    push(engine, policy, 0)
    fake.stale = True
    for parameter in policy.parameters():
        parameter.data += 0.1
    with pytest.raises(RolloutError, match=r"differ by up to .* nats, VLLMEngine.probe_tolerance is 0.001"):
        push(engine, policy, 1)
    with pytest.raises(RuntimeError, match="no weights"):
        one(engine)
    engine.close()


def test_servers_sleep_while_nothing_is_generated(fake: FakeVLLM) -> None:
    engine = connect(fake, sleep=True)
    for version in range(2):
        push(engine, tiny(True), version)
        ask(engine, [request((1, 2), key=key, max_tokens=1) for key in range(3)])
        assert engine._asleep is not None
        engine._asleep.result()
    control = [route for route, _ in fake.requests if route in ("/sleep", "/wake_up", "/pause", "/resume")]
    assert control == ["/pause", "/resume", "/sleep", "/wake_up", "/pause", "/resume", "/sleep"]
    engine.close()


def test_a_prompt_is_scored_the_same_twice_and_its_first_token_not_at_all(fake: FakeVLLM, engine: VLLMEngine) -> None:
    """Cached prefixes gave stale scores or crashed (vLLM #42245, #8268); position 0 has None."""
    push(engine, tiny(True), 1)
    prompt = [1, 2, 3, 4]
    sampling = {"max_tokens": 1, "temperature": 1.0, "seed": 0, "prompt_logprobs": 0, "logprobs": 0}
    question = json.dumps({"model": "policy", "token_ids": prompt, "sampling_params": sampling}).encode()
    scored = []
    for _ in range(2):
        asked = urllib.request.Request(fake.url + GENERATE, question, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked) as reply:
            answer = json.load(reply)
        assert answer["prompt_logprobs"][0] is None
        scored.append(prompt_logprobs_of(fake.url, answer))
    assert scored[0] == scored[1]
    logits = tiny(True)(input_ids=torch.tensor([prompt])).logits[0, :-1]
    exact = logits.log_softmax(-1).gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert scored[0] == pytest.approx(exact.tolist(), abs=1e-5)


def test_the_probe_comes_first_and_every_nth_time(fake: FakeVLLM) -> None:
    engine = connect(fake, probe_every=3)
    policy = tiny(True)
    engine.attach(policy)
    probed = []
    for version in range(7):
        before = len(fake.requests)
        push(engine, policy, version)
        probed.append((GENERATE) in [route for route, body in fake.requests[before:] if body])
    assert probed == [True, False, False, True, False, False, True]
    engine.close()


def test_only_one_bucket_of_full_tensors_is_ever_held() -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def gathered() -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for number in range(40):
            most = max(most, sum(reference() is not None for reference in alive))
            tensor = torch.zeros(100)  # 400 bytes
            alive.append(weakref.ref(tensor))
            yield str(number), tensor
            del tensor

    gc.collect()
    for bucket in buckets(gathered(), size=1600):
        assert len(bucket) <= 4
        del bucket
    assert most <= 5  # a bucket, and the one that did not fit in it
    assert len(alive) == 40


def test_a_push_leaves_no_file_behind(fake: FakeVLLM, tmp_path: Path) -> None:
    engine = connect(fake, transport=DiskTransport(folder=str(tmp_path)))
    fake.fail("/update_weights", status=500)
    with pytest.raises(EngineOutage):
        push(engine, tiny(True), 0)
    push(engine, tiny(True), 0)
    assert not list(tmp_path.rglob("*.safetensors"))
    engine.close()
    assert not list(tmp_path.iterdir())


# Servers that cannot work


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"version": "0.22.1"}, r"runs vLLM 0.22.1.* needs 0.29 or newer"),
        ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
        ({"backend": "nccl"}, "takes weights by 'nccl' and VLLMEngine.transport sends them by 'disk'"),
    ],
)
def test_a_server_that_cannot_serve_is_refused(settings: dict[str, Any], words: str) -> None:
    with FakeVLLM(tiny(True), CONTEXT, **settings) as fake:
        engine = connect(fake)
        with pytest.raises(ConfigurationError, match=words):
            push(engine, tiny(True), 0)
        engine.close()


def test_a_server_without_the_routes_or_the_model_is_refused(fake: FakeVLLM) -> None:
    engine = connect(fake)
    fake.fail("/server_info", status=404)
    with pytest.raises(ConfigurationError, match="VLLM_SERVER_DEV_MODE=1"):
        push(engine, tiny(True), 0)
    engine.model = "another"
    engine.close()
    engine.attach(tiny(True))
    with pytest.raises(ConfigurationError, match=r"serves \['policy'\] and no model 'another'"):
        push(engine, tiny(True), 0)
    engine.close()


def test_no_server_at_all() -> None:
    engine = VLLMEngine(["http://127.0.0.1:9"], outage_timeout=0.2)
    engine.attach(tiny(True))
    with pytest.raises(EngineOutage, match=r"127.0.0.1:9 was not healthy within 0.2 s: .*cannot be reached"):
        push(engine, tiny(True), 0)
    engine.close()
    unserved = VLLMEngine()
    unserved.attach(tiny(True))
    with pytest.raises(ConfigurationError, match="VLLMSidecar"):
        push(unserved, tiny(True), 0)
    with pytest.raises(ConfigurationError, match="concurrency must be at least 1"):
        VLLMEngine(concurrency=0)


def test_words_are_found_wherever_they_are() -> None:
    assert (
        words('{"error": {"message": "a"}}') == words('{"detail": "a"}') == words('{"error": "a"}') == words("a") == "a"
    )


# A run


def collection(engine: VLLMEngine, **settings: Any) -> RolloutDataModule:
    return RolloutDataModule(
        Countdown(), engine, tasks_per_collection=2, group_size=2, max_turns=2, max_tokens=4, context_limit=128,
        **settings,
    )  # fmt: skip


def weights_after(fit: Any, fake: FakeVLLM, module: Any, epochs: int = 2) -> Tensor:
    engine = connect(fake, attempts=1)
    fit(module, collection(engine), max_epochs=epochs)
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def source(tokenizer: Any) -> Any:
    class Source:
        def load(self) -> Any:
            return tiny(True), tokenizer

    return Source()


def test_an_outage_in_a_collection_changes_nothing_that_is_trained(fit: Any, fake: FakeVLLM, tokenizer: Any) -> None:
    expected = weights_after(fit, fake, agent(policy=source(tokenizer)))
    fake.fail(GENERATE, status=405)  # the question whether the route is open
    fake.fail(GENERATE, times=3)  # three turns go well
    fake.fail(GENERATE, status=500, text="worker died")
    after = weights_after(fit, fake, agent(policy=source(tokenizer)))
    torch.testing.assert_close(after, expected, rtol=0, atol=0)


def test_an_outage_that_stays_ends_the_run_with_one_message(fit: Any, fake: FakeVLLM, tokenizer: Any) -> None:
    module = agent(policy=source(tokenizer))
    fake.fail("/pause", times=3, status=500, text="worker died")
    with pytest.raises(EngineOutage, match="worker died"):
        fit(module, collection(connect(fake)))
    assert module.policy_version == 0


def test_full_weights_are_the_names_that_travel(fake: FakeVLLM, engine: VLLMEngine) -> None:
    policy = tiny(True)
    push(engine, policy, 0)
    served_weights = dict(fake.model.model.named_parameters())
    for name, weight in full_weights(policy):
        torch.testing.assert_close(served_weights[name], weight, rtol=0, atol=0)
