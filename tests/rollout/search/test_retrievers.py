"""Retrieval in process and over HTTP; a server that fails is a failure, never a reward."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from doubles import ScriptedEngine
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.collector import Collector, Sampling
from sorl_lightning.rollout.contract import check_environment
from sorl_lightning.rollout.environments import MultiHopSearch
from sorl_lightning.rollout.search.retrievers import BM25, HTTPRetriever
from sorl_lightning.types import Ending

pytest.importorskip("bm25s")
ROWS = [
    {"id": "10", "contents": '"Mali"\nMali - Capital: Bamako. Internet code .ml'},
    {"id": "11", "contents": '"Togo"\nTogo - Capital: Lome. Internet code .tg'},
    {"id": "12", "contents": '"Tonga"\nThe internet code of the islands is .to'},
]
QUESTION = {
    "id": "0",
    "question": "What is the capital of the country with code .ml?",
    "golden_answers": ["Bamako"],
    "decomposition": [
        {"question": "Which country?", "answer": "Mali", "support": ["10"], "evidence": ".ml", "queries": ["code .ml"]},
        {"question": "Capital of Mali?", "answer": "Bamako", "support": ["10"], "queries": ["capital Mali"]},
    ],
}


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setenv("SORL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for split in ("train", "validation", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(QUESTION) + "\n")
    return tmp_path


def environment(files, retriever=None, **settings):
    splits = {split: str(files / f"{split}.jsonl") for split in ("train", "validation", "test")}
    return MultiHopSearch(**splits, retriever=retriever or BM25(str(files / "corpus.jsonl")), **settings)


@pytest.fixture
def serve():
    """A server of Search-R1's protocol; ``answer`` makes the body from the request."""
    servers = []

    def start(answer, status=200):
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                body = answer(asked)
                body = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                """Quiet."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}/retrieve"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def scored(asked):
    assert asked["return_scores"] is True
    return {"result": [[{"document": row, "score": 1.0} for row in ROWS[: asked["topk"]]] for _ in asked["queries"]]}


def ids(retriever, query, topk=3):
    return [passage.id for passage in asyncio.run(retriever.search(query, topk))]


def test_bm25_finds_words_and_codes_and_keeps_its_index(files) -> None:
    retriever = BM25(str(files / "corpus.jsonl"))
    assert set(retriever.check()) == {"10", "11", "12"}
    assert ids(retriever, "capital of Mali") == ["10", "11"]
    assert ids(retriever, ".to") == ["12"]
    assert ids(retriever, "to") == ids(retriever, "zebra") == ids(retriever, "") == []
    assert ids(retriever, "internet code", topk=2) == ids(retriever, "internet code", topk=9)[:2]
    (index,) = (files / "cache/bm25").iterdir()
    made = index.stat().st_mtime_ns
    assert len(ids(BM25(str(files / "../" / files.name / "corpus.jsonl")), "code")) == 3
    assert [path.stat().st_mtime_ns for path in (files / "cache/bm25").iterdir()] == [made]


def test_a_server_of_either_form_is_understood(serve) -> None:
    for answer in (scored, lambda asked: {"result": [ROWS[: asked["topk"]]]}):
        retriever = HTTPRetriever(serve(answer))
        assert retriever.check() is None
        assert ids(retriever, "Mali", 2) == ["10", "11"]
    plain = HTTPRetriever(serve(lambda asked: {"result": [[{"title": '"T"', "text": "body"}]]}))
    (passage,) = asyncio.run(plain.search("x", 1))
    assert (passage.title, passage.text) == ("T", "body")


@pytest.mark.parametrize("form", ["bm25", "http"])
def test_the_contract_holds_and_the_expert_finds_its_way(files, serve, form) -> None:
    retriever = BM25(str(files / "corpus.jsonl")) if form == "bm25" else HTTPRetriever(serve(scored))
    check_environment(environment(files, retriever))


def test_the_expert_takes_no_hop_that_it_was_not_shown(files, serve) -> None:
    episode = environment(files, HTTPRetriever(serve(lambda asked: {"result": [[]]})))
    episode.reset(episode.tasks("train")[0])
    assert episode.expert_action() == "<search>code .ml</search>"
    step = asyncio.run(episode.step(episode.expert_action()))
    assert step.observation == "<information>No document matches.</information>"
    assert episode.expert_action() == "<answer>unknown</answer>"


def test_observations_rewards_and_counts(files) -> None:
    episode = environment(files, invalid_penalty=0.25, reward="f1", passage_words=4)
    (message,) = episode.reset(episode.tasks("train")[0])
    assert message["content"].endswith("Question: What is the capital of the country with code .ml?")
    bad = asyncio.run(episode.step("search for Mali"))
    assert bad.reward == -0.25
    assert bad.observation.startswith("My previous action is invalid.")
    found = asyncio.run(episode.step("<think>hm</think><search>capital of Mali</search>"))
    assert found.observation == (
        '<information>Doc 1(Title: "Mali") Mali - Capital: Bamako.\n'
        'Doc 2(Title: "Togo") Togo - Capital: Lome.</information>'
    )
    said = asyncio.run(episode.step("<answer>Bamako city</answer>"))
    assert said.reward == pytest.approx(2 / 3)
    assert said.terminated
    assert said.info == {
        "success": False, "f1": pytest.approx(2 / 3), "searches": 1.0, "malformed": 1.0, "valid_fraction": 2 / 3,
    }  # fmt: skip


def test_the_files_own_prompt(files) -> None:
    row = {**QUESTION, "prompt": [{"role": "user", "content": "As in the file."}]}
    (files / "train.jsonl").write_text(json.dumps(row) + "\n")
    episode = environment(files, instruction="file")
    assert episode.reset(episode.tasks("train")[0]) == row["prompt"]
    with pytest.raises(ConfigurationError, match="has no prompt"):
        episode.reset(episode.tasks("test")[0])
    told = environment(files, instruction="Q: {question}")
    assert told.reset(told.tasks("test")[0])[0]["content"] == f"Q: {QUESTION['question']}"


def play(chat, world, context_limit=4096):
    tokenizer = chat.tokenizer
    said = tokenizer.encode("<search>Mali</search>", add_special_tokens=False)
    engine = ScriptedEngine(lambda request: ([*said, request.stop_token_ids[0]], [-1.0] * (len(said) + 1)))
    sampling = Sampling(max_tokens=40, context_limit=context_limit, temperature=1.0)
    collector = Collector(world, engine, chat, sampling, retries=1)
    return asyncio.run(collector.collect(world.tasks("train"), max_turns=3, seed=0))


def slow(asked):
    if asked["queries"] != ["country"]:
        time.sleep(1.0)
    return scored(asked)


def later(answer):
    """A sound first answer, to the check, and then another one."""
    return lambda asked: scored(asked) if asked["queries"] == ["country"] else answer


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (slow, "TimeoutError"),
        (later(b"\xff\xfe"), "UnicodeDecodeError|JSONDecodeError"),
        (later({"error": "busy"}), "KeyError"),
    ],
    ids=["hangs", "not utf-8", "error"],
)  # fmt: skip
def test_a_server_that_fails_under_way_is_never_a_reward(chat, files, serve, answer, why) -> None:
    world = environment(files, HTTPRetriever(serve(answer), timeout=0.3))
    collection = play(chat, world)
    assert collection.trajectories == ()
    (failure,) = collection.failures
    assert re.search(f"MultiHopSearch failed at task 'train/0': ({why})", failure)


def test_a_megabyte_is_shown_in_part_and_one_endless_word_ends_the_episode(chat, files, serve) -> None:
    def answer(text):
        return lambda asked: {"result": [[{"id": "1", "contents": f"T\n{text}"}]]}

    long = play(chat, environment(files, HTTPRetriever(serve(answer("word " * 200_000)))))
    (trajectory,) = long.trajectories
    assert trajectory.ending is Ending.TURN_LIMIT
    assert len(trajectory.turns[0].observation or "") < 700
    (trajectory,) = play(chat, environment(files, HTTPRetriever(serve(answer("x" * 1_000_000))))).trajectories
    assert trajectory.ending is Ending.CONTEXT_LIMIT
    assert len(trajectory.turns) == 1


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda f: environment(f, HTTPRetriever("http://127.0.0.1:9/retrieve")),
            "the retriever at http://127.0.0.1:9/retri",
        ),
        (lambda f: environment(f, BM25(str(f / "none.jsonl"))), "none.jsonl cannot be read"),
        (lambda f: MultiHopSearch(train=str(f / "train.jsonl")), "retriever is not set"),
        (
            lambda f: MultiHopSearch(test=str(f / "test.jsonl"), retriever=BM25("x")),
            "there is no train file of questions",
        ),
        (lambda f: environment(f, hops=[3]), r"has no questions of \[3\] hops"),
        (lambda f: MultiHopSearch(topk=0), "topk must be at least 1, got 0"),
        (lambda f: MultiHopSearch(instruction="say"), 'text with "{question}"'),
        (lambda f: MultiHopSearch(reward="bleu"), "exact_match, f1"),  # type: ignore[arg-type]
        (lambda f: MultiHopSearch(invalid_penalty=-1.0), "invalid_penalty must be 0 or more"),
    ],
)
def test_what_cannot_work_is_refused_before_rollouts(files, make, sentence) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        make(files).tasks("train")


def test_a_corpus_without_the_gold_passages_is_refused(files) -> None:
    (files / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[1:]))
    with pytest.raises(ConfigurationError, match="question '0' rests on the passages 10, and the corpus has none"):
        environment(files).tasks("train")


def test_a_server_that_answers_otherwise_is_refused_before_rollouts(files, serve) -> None:
    for answer, status in (
        (lambda asked: {"result": 3}, 200),
        (lambda asked: b"busy", 503),
        (lambda asked: b"<p>", 200),
    ):
        with pytest.raises(ConfigurationError, match="does not answer as it should"):
            environment(files, HTTPRetriever(serve(answer, status))).tasks("train")
