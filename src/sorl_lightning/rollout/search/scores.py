"""Exact match and F1 of an answer against its aliases, as question answering counts them."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """Lower case, without punctuation and articles, single spaces.

    >>> normalised("The  Republic of Mali.")
    'republic of mali'
    """
    plain = text.lower().translate(PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def exact_match(answer: str, aliases: Sequence[str]) -> float:
    """1 if the answer is one of the aliases after normalisation, else 0.

    Source: Rajpurkar et al. 2016, arXiv:1606.05250; Jin et al. 2025, arXiv:2503.09516 (Search-R1).
    """
    return float(normalised(answer) in {normalised(alias) for alias in aliases})


def f1(answer: str, aliases: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of the answer's words, for the alias that fits best.

    >>> f1("the city of Bamako", ["Bamako"])
    0.5
    """
    return max((_f1(normalised(answer).split(), normalised(alias).split()) for alias in aliases), default=0.0)


def _f1(said: Sequence[str], wanted: Sequence[str]) -> float:
    shared = sum((Counter(said) & Counter(wanted)).values())
    return 2 * shared / (len(said) + len(wanted)) if shared else 0.0
