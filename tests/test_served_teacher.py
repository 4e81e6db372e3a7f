"""A teacher behind HTTP says what the same teacher says in this process, or refuses before training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from conftest import agent, serving
from distilling import rollouts, watched
from doubles import Countdown
from served import Served, push, tiny
from sorl_lightning.errors import ConfigurationError, EngineOutage, RolloutError
from sorl_lightning.models import ModelSource, load_tokenizer
from sorl_lightning.objectives import Distillation
from sorl_lightning.served_teacher import ServedTeacher
from sorl_lightning.teachers import LocalTeacher, Teacher
from sorl_lightning.testing.fake_vllm import FakeVLLM

SCORE = "/v1/completions"


class Source(ModelSource):
    def __init__(self, model: Any) -> None:
        self.model = model

    def load(self) -> Any:
        return self.model, load_tokenizer("sorl:textworld")


@pytest.fixture
def teacher(server: Served) -> ServedTeacher:
    """The server's model, which knows what the student does not."""
    engine = server.engine()
    engine.attach(server.policy(seed=7))
    push(engine, server.policy(seed=7), 0)
    engine.close()
    return ServedTeacher([server.url], model=engine.transport.served_as("policy"))


def student(teacher: Teacher, divergence: Any, **settings: Any) -> Any:
    own = {"divergence": divergence, "top_k": 20, "ratio_clip": None, **settings}
    return agent(policy=Source(tiny(True, seed=1)), objective=Distillation(**own), teacher=teacher)


@serving("disk", "gloo")
@pytest.mark.parametrize("divergence", ["topk_reverse_kl_tail", "topk_forward_kl_tail", "topk_reverse_kl", "k1", "k2"])
def test_losses_and_gradients_are_those_of_a_local_teacher(
    fit: Any, server: Served, teacher: ServedTeacher, divergence: str
) -> None:
    local = LocalTeacher(Source(server.policy(seed=7)))
    here, there = (watched(fit, student(each, divergence), rollouts()) for each in (local, teacher))
    losses = [watch.figures[0]["train/loss"] for watch in (here, there)]
    assert abs(losses[0]) > 0.01
    assert losses[1] == pytest.approx(losses[0], rel=0, abs=1e-4)
    scale = float(here.gradients[0].abs().max())
    torch.testing.assert_close(there.gradients[0], here.gradients[0], rtol=0, atol=1e-4 * scale)
    divergences = [watch.figures[0]["train/divergence"] for watch in (here, there)]
    assert divergences[1] == pytest.approx(divergences[0], rel=0, abs=1e-4)


@serving("disk", "gloo")
def test_scores_are_those_of_a_local_teacher(fit: Any, server: Served, teacher: ServedTeacher) -> None:
    rows = watched(fit, student(teacher, "topk_reverse_kl_tail"), rollouts()).batches[0]
    local = LocalTeacher(Source(server.policy(seed=7)))
    local.attach("student", load_tokenizer("sorl:textworld"), 1024)
    for top_k in (0, 1, 20):
        here, there = (each.score(rows, top_k, 1.0) for each in (local, teacher))
        assert there.ids.shape == here.ids.shape == (*rows.turn.shape, top_k)
        torch.testing.assert_close(there.logprobs, here.logprobs, rtol=0, atol=5e-5)
        torch.testing.assert_close(there.sampled_logprobs, here.sampled_logprobs, rtol=0, atol=5e-5)
        clear = (here.logprobs[..., :-1] - here.logprobs[..., 1:] > 1e-4).all(-1)
        torch.testing.assert_close(there.ids[clear], here.ids[clear])
    assert here.sampled_logprobs.count_nonzero() == rows.generated.sum()


@serving("disk")
def test_as_many_as_the_vocabulary(fit: Any, server: Served, teacher: ServedTeacher) -> None:
    local = LocalTeacher(Source(server.policy(seed=7)))
    here, there = (
        watched(fit, student(each, "topk_reverse_kl_tail", top_k=10**6), rollouts()) for each in (local, teacher)
    )
    assert there.batches[0].teacher.ids.shape[-1] == 1024
    assert there.figures[0]["train/loss"] == pytest.approx(here.figures[0]["train/loss"], rel=0, abs=1e-4)


@serving("gloo")  # which has a limit of 20
def test_more_than_the_server_returns_is_refused_before_training(
    fit: Any, server: Served, teacher: ServedTeacher
) -> None:
    environment = Countdown()
    with pytest.raises(ConfigurationError, match=r"(?s)top 50: .*greater than max allowed: 20.*Lower objective.top_k"):
        fit(student(teacher, "topk_reverse_kl_tail", top_k=50), rollouts(environment))
    assert not environment.resets


@serving("adapters")
def test_adapters_are_refused(fit: Any, server: Served) -> None:
    engine = server.engine()
    engine.attach(server.policy())
    push(engine, server.policy(), 0)
    engine.close()
    with pytest.raises(ConfigurationError, match=r"'policy-adapters' at .* is adapters on another model"):
        fit(student(ServedTeacher([server.url], model="policy-adapters"), "k2"), rollouts())


# With a fake server


@pytest.fixture
def fake(tokenizer: Any) -> Iterator[FakeVLLM]:
    with FakeVLLM(tiny(True), tokenizer=tokenizer) as server:
        yield server


def served_by(fake: FakeVLLM, **settings: Any) -> ServedTeacher:
    return ServedTeacher([fake.url], model="policy", **{"attempts": 1, "outage_timeout": 0.5, **settings})


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "jsd"])
def test_whole_distributions_are_refused(fit: Any, fake: FakeVLLM, divergence: str) -> None:
    with pytest.raises(ConfigurationError, match="ServedTeacher returns the log-probabilities of its top K"):
        fit(student(served_by(fake), divergence), rollouts())
    assert not fake.requests


def test_other_temperatures_are_refused(fit: Any, fake: FakeVLLM) -> None:
    module = student(served_by(fake), "topk_reverse_kl_tail", temperature=0.7)
    with pytest.raises(ConfigurationError, match=r"scores at temperature 1, as vLLM does, and is asked for 0\.7"):
        fit(module, rollouts())


def test_a_missing_model_another_tokenizer_and_no_server_are_refused(fit: Any, fake: FakeVLLM, tokenizer: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"serves \['policy'\] and no model 'other'"):
        fit(student(ServedTeacher([fake.url], model="other"), "k2"), rollouts())
    fake.fail("/tokenize", change=lambda answer: {"tokens": answer["tokens"][1:]})
    with pytest.raises(ConfigurationError, match="read text as different tokens"):
        fit(student(served_by(fake), "k2"), rollouts())
    away = ServedTeacher(["http://127.0.0.1:9"], outage_timeout=0.2)
    with pytest.raises(EngineOutage, match=r"127\.0\.0\.1:9 was not healthy within 0\.2 s"):
        fit(student(away, "k2"), rollouts())


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"urls": []}, "at least one server"), ({"concurrency": 0}, "concurrency"), ({"request_timeout": 0}, "timeout")],
)
def test_settings_that_cannot_work(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        ServedTeacher(**{"urls": ["http://127.0.0.1:9"], **settings})


def test_rows_are_shared_out_and_an_outage_is_got_over(fit: Any, tokenizer: Any) -> None:
    with FakeVLLM(tiny(True), tokenizer=tokenizer) as first, FakeVLLM(tiny(True), tokenizer=tokenizer) as second:
        teacher = ServedTeacher([first.url, second.url], model="policy", attempts=1, outage_timeout=2.0)
        undisturbed = watched(fit, student(teacher, "k2"), rollouts())
        counts = [[route for route, _ in each.requests].count(SCORE) for each in (first, second)]
        assert min(counts) > 1
        assert abs(counts[0] - counts[1]) <= 1
        second.fail(SCORE)  # the question before training: once more succeeds
        second.fail(SCORE, status=500, text="worker died")
        after = watched(fit, student(teacher, "k2"), rollouts())
        torch.testing.assert_close(after.gradients[0], undisturbed.gradients[0], rtol=0, atol=0)


def halved(answer: Any) -> Any:
    answer["choices"][0]["prompt_logprobs"].pop()
    return answer


def positive(answer: Any) -> Any:
    for entry in answer["choices"][0]["prompt_logprobs"][1:]:
        for value in entry.values():
            value["logprob"] = 3.0
    return answer


def unknown(answer: Any) -> Any:
    for entry in answer["choices"][0]["prompt_logprobs"][1:]:
        entry["5000"] = {"logprob": -0.1}
    return answer


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (halved, "did not score"),
        (lambda answer: {"choices": []}, "did not score"),
        (positive, "gave no 2 log-probabilities"),
        (unknown, "token 5000 likely, and the student has 1024"),
    ],
    ids=["short", "empty", "positive", "vocabulary"],
)
def test_what_is_no_score_is_never_trained_on(fit: Any, fake: FakeVLLM, change: Any, words: str) -> None:
    fake.fail(SCORE, change=lambda answer: answer)  # the question before training
    fake.fail(SCORE, times=50, change=change)
    module = student(served_by(fake), "topk_reverse_kl_tail", top_k=2)
    with pytest.raises(RolloutError, match=words):
        fit(module, rollouts())
    assert module.policy_version == 0
