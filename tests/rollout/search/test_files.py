"""Question files and corpora of the public schemas are read, and bad ones named in a sentence."""

from __future__ import annotations

import json

import pytest

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.search.corpus import Passage, read_corpus
from sorl_lightning.rollout.search.questions import Hop, read_questions
from sorl_lightning.rollout.search.scores import exact_match, f1

FLASHRAG = {"id": "train_0", "question": "who wrote it?", "golden_answers": ["Ada", "Ada Lovelace"]}
SEARCH_R1 = {
    "data_source": "nq",
    "prompt": [{"role": "user", "content": "Answer the given question. ... Question: who wrote it?\n"}],
    "ability": "fact-reasoning",
    "reward_model": {"style": "rule", "ground_truth": {"target": ["Ada", "Ada Lovelace"]}},
    "extra_info": {"split": "train", "index": 0},
}
VERL_AGENT = {
    **SEARCH_R1,
    "env_kwargs": {
        "question": "who wrote it?",
        "ground_truth": {"target": ["Ada", "Ada Lovelace"]},
        "data_source": "nq",
    },
}


def write(path, *rows):
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow.parquet import write_table

        write_table(pyarrow.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("row", "number"), [(FLASHRAG, "train_0"), (SEARCH_R1, "nq-0"), (VERL_AGENT, "nq-0")],
    ids=["flashrag", "search_r1", "verl_agent"],
)  # fmt: skip
def test_public_schemas_are_read(tmp_path, suffix, row, number) -> None:
    (question,) = read_questions(write(tmp_path / f"train.{suffix}", row))
    assert (question.id, question.question, question.answers) == (number, "who wrote it?", ("Ada", "Ada Lovelace"))
    assert [dict(message) for message in question.prompt] == row.get("prompt", [])


def test_one_number_in_two_data_sets_is_two_questions(tmp_path) -> None:
    rows = [{**SEARCH_R1, "id": "train_0", "data_source": name} for name in ("nq", "hotpotqa")]
    assert [q.id for q in read_questions(write(tmp_path / "train.jsonl", *rows))] == ["nq-train_0", "hotpotqa-train_0"]


def test_rows_without_a_number_are_numbered(tmp_path) -> None:
    row = {"question": "q", "golden_answers": "a"}
    assert [(q.id, q.answers) for q in read_questions(write(tmp_path / "a.jsonl", row, row))] == [
        ("0", ("a",)),
        ("1", ("a",)),
    ]


def test_hops_are_read(tmp_path) -> None:
    hops = [
        {"question": "where?", "answer": "Rome", "support": [7], "queries": ["Rome"]},
        {"question": "b", "answer": "c"},
    ]
    (question,) = read_questions(write(tmp_path / "a.jsonl", {**FLASHRAG, "decomposition": hops}))
    assert question.hops == (
        Hop(question="where?", answer="Rome", support=("7",), evidence="Rome", queries=("Rome",)),
        Hop(question="b", answer="c", evidence="c", queries=("b",)),
    )


def without(row, *names):
    return {name: value for name, value in row.items() if name not in names}


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([], "questions.jsonl holds no questions"),
        ([without(FLASHRAG, "golden_answers")], "row 1 has no column 'golden_answers'; .* it has id, question"),
        ([without(FLASHRAG, "question")], "row 1 has no column 'question'"),
        ([without(SEARCH_R1, "reward_model")], "row 1 has no column 'golden_answers'"),
        ([{**SEARCH_R1, "reward_model": {"style": "rule"}}], "row 1 has no column 'ground_truth'"),
        ([{**FLASHRAG, "golden_answers": []}], "row 1 is malformed: answers must be a list of texts"),
        ([{**FLASHRAG, "golden_answers": [3]}], "row 1 is malformed: answers must be a list of texts"),
        ([{**FLASHRAG, "question": " "}], "row 1 is malformed: question must be text"),
        ([{**SEARCH_R1, "prompt": "who?"}], "row 1 is malformed"),
        ([{**FLASHRAG, "decomposition": [{"question": "a"}]}], "row 1 has no column 'answer'"),
        ([FLASHRAG, FLASHRAG], "row 2: a second question with the id 'train_0'"),
        ([[1]], "line 1: not a JSON object"),
    ],
)
def test_a_bad_question_file_is_named(tmp_path, rows, sentence) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        read_questions(write(tmp_path / "questions.jsonl", *rows))


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.jsonl", b'{"id": \n', "a.jsonl, line 1: not JSON"),
        ("a.jsonl", b'{"id": "\xff"}\n', "a.jsonl is not UTF-8 text"),
        ("a.parquet", b"no parquet", "a.parquet cannot be read as parquet"),
        ("a.parquet", None, "a.parquet cannot be read as parquet"),
        ("a.jsonl", None, "a.jsonl cannot be read: No such file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, sentence) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=sentence):
        read_questions(tmp_path / name)


def test_a_corpus_is_read_and_written_alike(tmp_path) -> None:
    path = write(tmp_path / "corpus.jsonl", {"id": 7, "contents": '"Mali: Capital"\nBamako\nand more'})
    (passage,) = read_corpus(path)
    assert passage == Passage(id="7", title="Mali: Capital", text="Bamako\nand more")
    assert passage.contents == '"Mali: Capital"\nBamako\nand more'


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([], "corpus.jsonl holds no passages"),
        ([{"id": "1"}], "line 1: a passage needs id and contents"),
        ([{"contents": "a\nb"}], "line 1: a passage needs id and contents"),
        ([{"id": "1", "contents": 5}], "line 1: a passage needs id and contents"),
        ([{"id": "1", "contents": "a\nb"}, {"id": 1, "contents": "c\nd"}], "line 2: a second passage with the id '1'"),
    ],
)
def test_a_bad_corpus_is_named(tmp_path, rows, sentence) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        read_corpus(write(tmp_path / "corpus.jsonl", *rows))


@pytest.mark.parametrize(
    ("answer", "aliases", "exact", "overlap"),
    [
        ("The Bamako!", ["bamako"], 1.0, 1.0),
        ("Bamako, Mali", ["Bamako"], 0.0, 2 / 3),
        ("an U.S. dollar", ["euro", "US dollar"], 1.0, 1.0),
        ("Paris", ["Bamako"], 0.0, 0.0),
        ("", ["the"], 1.0, 0.0),
        ("yes yes no", ["yes no no"], 0.0, 2 / 3),
    ],
)
def test_scores(answer, aliases, exact, overlap) -> None:
    assert exact_match(answer, aliases) == exact
    assert f1(answer, aliases) == pytest.approx(overlap)
