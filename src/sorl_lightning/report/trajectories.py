"""The trajectory log as the report's browser reads it: compact, and no more than it can show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.report.runs import Run
from sorl_lightning.trajectory_files import SCHEMA

# What tokens can be shaded by: name, unit, and how values become a shade: around 1 in ratios, around 0, or upwards.
SHADES = {
    "ratio": ("Importance ratio", "", "ratio"),
    "advantage": ("Advantage", "", "signed"),
    "divergence": ("Divergence from the teacher", "nats", "signed"),
    "reference_kl": ("KL from the reference", "nats", "signed"),
    "policy_kl": ("KL from the collection's policy", "nats", "signed"),
    "mismatch_kl": ("KL of trainer and engine", "nats", "signed"),
    "nll": ("Negative log-likelihood", "nats", "signed"),
    "entropy": ("Entropy", "nats", "signed"),
    "logprob": ("Log-probability when sampled", "nats", "signed"),
    "mask": ("Loss mask and clipping", "", "mask"),
}
UNSHADED = ("id", "piece", "policy_version", "clipped", "mismatch_factor")
DIGITS = 4  # significant ones that are kept of a token's figures: more than a shade or a tooltip shows


@dataclass
class Texts:
    """Texts that many trajectories share, each kept once."""

    kept: list[str] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)

    def place(self, text: str | None) -> int:
        """The number of a text; -1 of none."""
        if text is None:
            return -1
        if text not in self.places:
            self.places[text] = len(self.kept)
            self.kept.append(text)
        return self.places[text]


def browsed(runs: Sequence[Run], limit: int) -> dict[str, Any]:
    """At most ``limit`` trajectories, an equal share a run, evenly over what it logged.

    Raises:
        ConfigurationError: a line of a log is not one.
    """
    texts, rows, logged = Texts(), [], []
    for number, run in enumerate(runs):
        lines = sum(1 for _ in run.trajectories.lines())
        logged.append(lines)
        wanted = spaced(lines, limit // len(runs))
        for place, line in enumerate(run.trajectories.lines()):
            if place in wanted:
                rows.append({"run": number, **compact(parsed(line, run, place), texts)})
    columns = {name for row in rows for turn in row["turns"] for name in turn["tokens"]}
    shades = {name: shade for name, shade in SHADES.items() if name in columns}
    return {"rows": rows, "texts": texts.kept, "logged": logged, "shades": shades}


def spaced(count: int, limit: int) -> set[int]:
    """``limit`` of the numbers below ``count``, evenly spaced, the first and the last among them."""
    if count <= limit:
        return set(range(count))
    return {round(number * (count - 1) / max(limit - 1, 1)) for number in range(limit)}


def parsed(line: bytes, run: Run, place: int) -> dict[str, Any]:
    """A line of a log.

    Raises:
        ConfigurationError: it is not JSON, or of another schema.
    """
    where = f"line {place + 1} of the trajectory log in {str(run.trajectories.folder)!r}"
    try:
        record: dict[str, Any] = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigurationError(f"runs: {where} is no JSON: {error}") from error
    if record.get("schema") != SCHEMA:
        raise ConfigurationError(
            f"runs: {where} has schema {record.get('schema')}, and this version of sorl reads schema {SCHEMA}"
        )
    return record


def compact(record: dict[str, Any], texts: Texts) -> dict[str, Any]:
    """A line without what the browser does not show, its long texts by number."""
    names = ("collection", "policy_version", "group", "sibling", "reward", "success", "ending", "turn_limit", "update")
    return {
        **{name: record[name] for name in names},
        "task": texts.place(record["task"]),
        "prompt": texts.place(record["prompt"]),
        "turns": [compact_turn(turn, texts) for turn in record["turns"]],
    }


def compact_turn(turn: dict[str, Any], texts: Texts) -> dict[str, Any]:
    """Likewise; columns that no browser shades are left out, and constant ones have one value."""
    names = ("author", "prompt_tokens", "reward", "finish_reason")
    tokens = {name: column(values) for name, values in turn["tokens"].items() if name in (*SHADES, *UNSHADED)}
    return {
        **{name: turn[name] for name in names},
        "seconds": rounded(turn["seconds"]),
        "observation": texts.place(turn["observation"]),
        "count": len(turn["tokens"]["id"]),
        "tokens": tokens,
    }


def column(values: Sequence[Any]) -> Any:
    """One value where all are the same, so that a list is always one value a token."""
    short = [rounded(value) for value in values]
    return short[0] if short and not isinstance(short[0], str) and all(value == short[0] for value in short) else short


def rounded(value: Any) -> Any:
    """A number to the digits that are shown."""
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
