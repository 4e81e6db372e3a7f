"""Rows of a file, parquet, JSON or a JSON object a line, or of a data set."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.types import Message

Record = Mapping[str, Any]


def records(source: str | Path | Sequence[Record]) -> Iterator[tuple[int, Record]]:
    """Rows with their numbers, from 1; of a file that is JSON Lines the numbers are its lines'.

    Args:
        source: a file: by its name parquet, or .json with a list of rows or an object of rows by their ``id``, which
            each gets as a column; else JSON Lines. Or rows, such as a Hugging Face ``datasets.Dataset``.

    Raises:
        ConfigurationError: the file cannot be read, or a row is no object.
    """
    if not isinstance(source, (str, Path)):
        yield from enumerate(source, start=1)
    elif Path(source).suffix == ".parquet":
        yield from _parquet(source)
    elif Path(source).suffix == ".json":
        yield from _json(source)
    else:
        yield from json_lines(source)


def json_lines(path: str | Path) -> Iterator[tuple[int, Any]]:
    """Numbered rows of a file with a JSON object a line; empty lines are passed over.

    Raises:
        ConfigurationError: there is no such file, or it is no UTF-8 text, or a line is no JSON object.
    """
    with _text(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, _row(_parsed(line, f"{path}, line {number}"), f"{path}, line {number}")


def _json(path: str | Path) -> Iterator[tuple[int, Record]]:
    with _text(path) as file:
        content = _parsed(file.read() or "[]", str(path))
    if isinstance(content, dict):
        content = [{"id": name, **_row(row, f"{path}, {name!r}")} for name, row in content.items()]
    if not isinstance(content, list):
        raise ConfigurationError(f"{path}: neither a list nor an object of rows")
    for number, row in enumerate(content, start=1):
        yield number, _row(row, f"{path}, row {number}")


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{place}: not JSON: {error}") from error


def _row(row: Any, place: str) -> Any:
    if not isinstance(row, dict):
        raise ConfigurationError(f"{place}: not a JSON object")
    return row


@contextlib.contextmanager
def _text(path: str | Path) -> Iterator[TextIO]:
    try:
        with open(path, encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not UTF-8 text: {error}") from error


def write_lines(path: Path, rows: Iterable[Record]) -> None:
    """Write a JSON object a line."""
    with open(path, "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def messages_of(content: Any) -> list[Message]:
    """Chat messages: a list of role and content, or text, which is one message of the user.

    Raises:
        ValueError: it is neither, or empty.
    """
    if isinstance(content, str) and content.strip():
        return [Message(role="user", content=content)]
    rows = [] if isinstance(content, (str, Mapping)) else list(content or ())
    if not rows or not all(isinstance(row.get("role"), str) and isinstance(row.get("content"), str) for row in rows):
        raise ValueError(f'need text or messages such as [{{"role": "user", "content": "..."}}], got {content!r}')
    return [Message(role=row["role"], content=row["content"]) for row in rows]


def _parquet(path: str | Path) -> Iterator[tuple[int, Record]]:
    try:
        import pyarrow
        from pyarrow.parquet import read_table
    except ImportError as error:
        raise ConfigurationError("parquet files need pyarrow: pip install 'sorl-lightning[search]'") from error
    try:
        rows = read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigurationError(f"{path} cannot be read as parquet: {str(error).splitlines()[0]}") from error
    yield from enumerate(rows, start=1)
