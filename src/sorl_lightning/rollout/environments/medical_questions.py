"""Medical multiple-choice questions as their users' files have them: MedQA, MedMCQA, PubMedQA.

MedQA      {"question", "options": {"A": ..., ...}, "answer_idx": "B", "answer", "meta_info"}
MedMCQA    {"id", "question", "opa", "opb", "opc", "opd", "cop", ...}; cop counts from 0, or from 1 as first released
PubMedQA   {"pubid", "question", "context", "final_decision": "yes"|"no"|"maybe", ...}; or one object of such records
           by number with upper-case keys, as first released
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.records import Record, records

LETTERS = "ABCDEFGHIJ"
DECISIONS = ("yes", "no", "maybe")
KEYS = {
    "MedQA": ("question", "options", "answer_idx"),
    "MedMCQA": ("id", "question", "opa", "opb", "opc", "opd", "cop"),
    "PubMedQA": ("question", "context", "final_decision"),
}


class Question(NamedTuple):
    """One question.

    Attributes:
        id: unique in its file.
        context: what has to be read first; "" where there is nothing.
        options: texts by letter, in order.
        answer: letter of the right one.
    """

    id: str
    text: str
    context: str
    options: tuple[tuple[str, str], ...]
    answer: str


def read_questions(path: str, setting: str) -> list[Question]:
    """Questions of a file in one of the three schemas; one without an id is called by its number.

    Raises:
        ConfigurationError: the file is missing, empty, of another schema, or two questions share an id.
    """
    rows = [(number, lower_keys(record)) for number, record in records(path)]
    if not rows:
        raise ConfigurationError(f"{setting}: {path} holds no questions; it needs one JSON object a question")
    schema = next((name for name, keys in KEYS.items() if set(keys) <= set(rows[0][1])), None)
    if schema is None:
        wanted = "; ".join(f"{name}: {', '.join(keys)}" for name, keys in KEYS.items())
        raise ConfigurationError(f"{setting}: {path} has the columns {', '.join(rows[0][1])}; need one of {wanted}")
    convert = CONVERTERS[schema]([record for _, record in rows])
    questions = []
    for number, record in rows:
        missing = [key for key in KEYS[schema] if key not in record]
        if missing:
            raise ConfigurationError(f"{setting}: record {number} of {path} ({schema}) has no {', '.join(missing)}")
        try:
            questions.append(convert(str(record.get("id", number)), record))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigurationError(f"{setting}: record {number} of {path} ({schema}): {error}") from error
    twice = [identifier for identifier, count in Counter(question.id for question in questions).items() if count > 1]
    if twice:
        raise ConfigurationError(f"{setting}: {path} has two questions with the id {twice[0]}")
    return questions


def lower_keys(record: Record) -> Record:
    """A record whose keys are written small; PubMedQA's first release shouts."""
    names = {"contexts": "context"}
    lowered = {key.lower(): value for key, value in record.items()}
    return {names.get(key, key) if key not in record else key: value for key, value in lowered.items()}


def medqa(rows: Sequence[Record]) -> Callable[[str, Record], Question]:
    """MedQA's records, and those of ``sorl data hpo``."""

    def convert(identifier: str, record: Record) -> Question:
        options = tuple(sorted((str(letter), str(text)) for letter, text in record["options"].items()))
        return checked(Question(identifier, record["question"], "", options, record["answer_idx"]))

    return convert


def medmcqa(rows: Sequence[Record]) -> Callable[[str, Record], Question]:
    """MedMCQA's records; whether ``cop`` counts from 0 or 1 shows in the whole file."""
    found = {record.get("cop") for record in rows}
    first = 1 if 4 in found else 0

    def convert(identifier: str, record: Record) -> Question:
        texts = [str(record[f"op{letter}"]) for letter in "abcd"]
        right = record["cop"] - first
        if not 0 <= right < len(texts):
            raise ValueError(f"cop is {record['cop']}, need {first} to {first + 3} (a test file without answers?)")
        options = tuple(zip(LETTERS, texts, strict=False))
        return checked(Question(identifier, record["question"], "", options, LETTERS[right]))

    return convert


def pubmedqa(rows: Sequence[Record]) -> Callable[[str, Record], Question]:
    """PubMedQA's records: an abstract, and a question to be answered yes, no or maybe."""

    def convert(identifier: str, record: Record) -> Question:
        decision = record["final_decision"]
        if decision not in DECISIONS:
            raise ValueError(f"final_decision is {decision!r}, it can be one of: {', '.join(DECISIONS)}")
        context = record["context"]
        parts = context["contexts"] if isinstance(context, dict) else [context] if isinstance(context, str) else context
        options = tuple(zip(LETTERS, DECISIONS, strict=False))
        name = str(record.get("pubid", identifier))
        return checked(
            Question(name, record["question"], "\n".join(parts), options, LETTERS[DECISIONS.index(decision)])
        )

    return convert


def checked(question: Question) -> Question:
    """``question``, if it can be asked.

    Raises:
        ValueError: saying why not.
    """
    if not isinstance(question.text, str) or not question.text.strip():
        raise ValueError("the question is empty")
    if len(question.options) < 2:
        raise ValueError("there are fewer than two options")
    if question.answer not in dict(question.options):
        letters = ", ".join(letter for letter, _ in question.options)
        raise ValueError(f"the answer {question.answer!r} is none of the options {letters}")
    return question


CONVERTERS = {"MedQA": medqa, "MedMCQA": medmcqa, "PubMedQA": pubmedqa}
