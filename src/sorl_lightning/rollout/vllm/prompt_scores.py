"""What a server says of the tokens of a prompt (``prompt_logprobs``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sorl_lightning.errors import RolloutError


def scores_of(answer: Mapping[str, Any], tokens: int, url: str) -> list[Any]:
    """The server's entry on each token of a prompt of ``tokens`` tokens.

    Raises:
        RolloutError: some are missing; the message names the server at ``url``.
    """
    try:
        entries = answer["choices"][0]["prompt_logprobs"]
        complete = len(entries) == tokens
    except (KeyError, IndexError, TypeError):
        complete = False
    if not complete:
        raise RolloutError(f"{url} did not score {tokens} tokens: {answer!r:.600}")
    return list(entries)


def top_of(entry: Any, token: int, top_k: int, vocabulary: int) -> tuple[list[int], list[float], float]:
    """The ``top_k`` most likely tokens of one entry, their log-probabilities, and that of ``token``, nats.

    The server adds the token where it is not among them.

    Args:
        vocabulary: tokens that the student has.

    Raises:
        RolloutError: the entry has no such scores, or a token that the student lacks.
    """
    try:
        values = {int(key): float(value["logprob"]) for key, value in entry.items()}
        own = values[token]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RolloutError(f"the teacher gave no scores of token {token}: {entry!r:.300}") from error
    top = sorted(values, key=values.__getitem__, reverse=True)[:top_k]
    if len(top) < top_k or not all(math.isfinite(value) and value < 1e-3 for value in values.values()):
        raise RolloutError(f"the teacher gave no {top_k} log-probabilities: {entry!r:.300}")
    if max(values) >= vocabulary:
        raise RolloutError(
            f"the teacher finds token {max(values)} likely, and the student has {vocabulary} tokens: both "
            "need the same vocabulary"
        )
    return top, [values[key] for key in top], own
