"""A corpus of passages, in Search-R1's form: a line of JSON each, ``{"id": "7", "contents": "\\"Title\\"\\ntext"}``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.records import json_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A passage: its id in the corpus, its title, its text."""

    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """Title and text as a corpus file has them."""
        return f'"{self.title}"\n{self.text}'


def passage_of(row: Any) -> Passage:
    """The passage in a row of a corpus or of a retriever's answer: "contents", or "title" and "text".

    Raises:
        KeyError: a column is missing.
        TypeError: it is no text.
    """
    if "contents" in row:
        title, _, text = row["contents"].partition("\n")
        return Passage(id=str(row["id"]), title=title.strip('"'), text=text)
    title, text = row["title"], row["text"]
    if not isinstance(title, str) or not isinstance(text, str):
        raise TypeError("title and text must be strings")
    return Passage(id=str(row["id"]), title=title.strip('"'), text=text)


def read_corpus(path: str | Path) -> list[Passage]:
    """All passages of a corpus file.

    Raises:
        ConfigurationError: there is no such file, or a row is not a passage, or there are none, or two with one id.
    """
    passages: dict[str, Passage] = {}
    for number, row in json_lines(path):
        try:
            passage = passage_of(row)
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"{path}, line {number}: a passage needs id and contents (a title line, then text): {error}"
            ) from error
        if passage.id in passages:
            raise ConfigurationError(f"{path}, line {number}: a second passage with the id {passage.id!r}")
        passages[passage.id] = passage
    if not passages:
        raise ConfigurationError(f"{path} holds no passages")
    return list(passages.values())
