"""Conversations that somebody had, as a world: the policy can imitate them, turn by turn."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.environment import Environment, Step
from sorl_lightning.rollout.records import Record, messages_of, records
from sorl_lightning.types import Message, Task

Source = str | Path | Sequence[Record]


class RecordedChats(Environment):
    """Plays back recorded conversations, for imitation of their assistant.

    The expert says what the assistant said; whatever is said, the recorded answer follows. With
    ``ExpertEngine`` and the objective ``Imitation`` that is supervised training on every assistant turn, with the chat
    template and the masks of all other training here. A row has ``messages``, as Hugging Face's conversational data
    sets have it: any messages, then turns of the assistant, each followed by what it was answered.

    Args:
        train: parquet or JSON Lines file, or rows such as a ``datasets.Dataset``.
        validation: likewise; None: there is none.
        test: likewise.

    Step info: "success", whether all turns so far were word for word the assistant's; "agreement", their share.
    """

    def __init__(self, train: Source, validation: Source | None = None, test: Source | None = None) -> None:
        self.sources = {"train": train, "validation": validation, "test": test}

    def tasks(self, split: str) -> list[Task]:
        """A task a conversation; its id is the split and the row, or the row's ``id``.

        Raises:
            ConfigurationError: a row is no conversation, or has no turn of the assistant.
        """
        source = self.sources[split]
        return [] if source is None else [task_of(row, f"{split} row {n}", split, n) for n, row in records(source)]

    def reset(self, task: Task) -> list[Message]:
        """Everything before the assistant's first turn."""
        self._opening, self._turns = parts(task.payload)
        self._said = self._agreed = 0
        return self._opening

    def step(self, text: str) -> Step:
        """The recorded answer."""
        if self._said >= len(self._turns):
            return Step("", 0.0, True, info=self._info())
        expected, answer = self._turns[self._said]
        self._said += 1
        agrees = text.strip() == expected.strip()
        self._agreed += agrees
        over = self._said == len(self._turns)
        return Step("" if over else answer, float(agrees) / len(self._turns), over, info=self._info())

    def expert_action(self) -> str:
        """What the assistant said here."""
        if self._said >= len(self._turns):
            raise LookupError("the conversation is over")
        return self._turns[self._said][0]

    def _info(self) -> dict[str, float | bool]:
        return {"success": self._agreed == self._said, "agreement": self._agreed / max(1, self._said)}


def task_of(row: Record, place: str, split: str, number: int) -> Task:
    """The task in a row."""
    try:
        messages = messages_of(row.get("messages"))
        parts(messages)
    except (ValueError, AttributeError) as error:
        raise ConfigurationError(f"RecordedChats, {place}: messages: {error}") from error
    return Task(id=str(row.get("id", f"{split}-{number}")), payload=messages)


def parts(messages: Sequence[Message]) -> tuple[list[Message], list[tuple[str, list[Message]]]]:
    """What comes before the assistant's first turn, and each of its turns with what it was answered.

    What follows its last turn is nothing to be learnt from, and left out.

    Raises:
        ValueError: the assistant says nothing, or two things in a row, or nothing comes before.
    """
    places = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not places or not places[0]:
        raise ValueError("need messages that begin with another role and have a turn of the assistant")
    if any(after - before == 1 for before, after in itertools.pairwise(places)):
        raise ValueError("two turns of the assistant follow one another")
    ends = [*places[1:], len(messages)]
    turns = [
        (messages[start]["content"], list(messages[start + 1 : end])) for start, end in zip(places, ends, strict=True)
    ]
    return list(messages[: places[0]]), turns
