"""Question files as their users have them: parquet and jsonl of Search-R1, FlashRAG and verl-agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.records import records
from sorl_lightning.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One step to the answer.

    Attributes:
        question: what the step asks.
        answer: what it finds.
        support: ids of the passages that say so; any of them is enough.
        evidence: the words in them that say so.
        queries: search queries that an expert would try, in this order.
    """

    question: str
    answer: str
    support: tuple[str, ...] = ()
    evidence: str = ""
    queries: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question and what is known about it.

    Attributes:
        id: unique in its file.
        answers: any of them is right.
        source: data set that it comes from.
        prompt: messages that the file has for it.
        hops: steps to the answer, where the file says.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    source: str = ""
    prompt: tuple[Message, ...] = ()
    hops: tuple[Hop, ...] = ()


def read_questions(path: str | Path) -> list[Question]:
    """All questions of a parquet or jsonl file.

    A row has ``question`` and ``golden_answers``; or Search-R1's ``prompt`` and ``reward_model.ground_truth.target``;
    or verl-agent's ``env_kwargs`` with ``question`` and ``ground_truth``. ``id`` or ``extra_info.index`` names it,
    together with ``data_source``. ``decomposition`` gives the hops.

    Raises:
        ConfigurationError: the file cannot be read, is empty, a row lacks a column, or two have one id.
    """
    questions: dict[str, Question] = {}
    for number, row in records(path):
        try:
            question = question_of(row, number - 1)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            missing = f"has no column {error}" if isinstance(error, KeyError) else f"is malformed: {error}"
            raise ConfigurationError(
                f"{path}, row {number} {missing}; a question needs question and golden_answers, or Search-R1's prompt "
                f"and reward_model, or verl-agent's env_kwargs; it has {', '.join(sorted(row)) or 'nothing'}"
            ) from error
        if question.id in questions:
            raise ConfigurationError(f"{path}, row {number}: a second question with the id {question.id!r}")
        questions[question.id] = question
    if not questions:
        raise ConfigurationError(f"{path} holds no questions")
    return list(questions.values())


def question_of(row: Mapping[str, Any], index: int) -> Question:
    """The question in a row; ``index`` names it where the row does not.

    Raises:
        KeyError: a column is missing.
        ValueError: one holds something else than it should.
    """
    inner = row.get("env_kwargs") or row
    source = str(inner.get("data_source") or row.get("data_source") or "")
    prompt = tuple(Message(role=message["role"], content=message["content"]) for message in row.get("prompt") or ())
    asked = inner.get("question")
    if asked is None:
        if not prompt:
            raise KeyError("question")
        asked = prompt[-1]["content"].rpartition("Question:")[2]
    if not isinstance(asked, str) or not asked.strip():
        raise ValueError(f"question must be text, got {asked!r}")
    extra = row.get("extra_info") or {}
    number = row.get("id", extra.get("index", index))
    return Question(
        id="-".join(str(part) for part in (source, number) if part != ""),
        question=asked.strip(),
        answers=_answers(row, inner),
        source=source,
        prompt=prompt,
        hops=tuple(_hop(hop) for hop in row.get("decomposition") or ()),
    )


def _answers(row: Mapping[str, Any], inner: Mapping[str, Any]) -> tuple[str, ...]:
    if "golden_answers" in row:
        found: Any = row["golden_answers"]
    elif "ground_truth" in inner:
        found = inner["ground_truth"]
    elif "reward_model" in row:
        found = row["reward_model"]["ground_truth"]
    else:
        raise KeyError("golden_answers")
    if isinstance(found, Mapping):
        found = found["target"]
    answers = (found,) if isinstance(found, str) else tuple(found)
    if not answers or not all(isinstance(answer, str) for answer in answers):
        raise ValueError(f"answers must be a list of texts, got {found!r}")
    return answers


def _hop(row: Mapping[str, Any]) -> Hop:
    def texts(name: str) -> Sequence[str]:
        return tuple(str(value) for value in row.get(name) or ())

    return Hop(
        question=row["question"],
        answer=row["answer"],
        support=tuple(texts("support")),
        evidence=row.get("evidence") or row["answer"],
        queries=tuple(texts("queries")) or (row["question"],),
    )
