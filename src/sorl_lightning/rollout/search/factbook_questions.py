"""Questions of two and three hops over the Factbook, split by country, and the files that hold them."""

from __future__ import annotations

import random
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from sorl_lightning.cache import cache_folder, made_once
from sorl_lightning.rollout.records import write_lines
from sorl_lightning.rollout.search.corpus import Passage
from sorl_lightning.rollout.search.factbook import Fact, attributes, countries, links, passages_of

VERSION = "1"  # of what this module makes, in the name of its folder in the cache


class Field(NamedTuple):
    """Where a fact stands, and how it is asked for.

    Attributes:
        name: of the field.
        question: that asks for it, "" where it only links countries.
        queries: that find it from the country's name, or the country from the fact: the best by BM25 first.
    """

    name: str
    question: str
    queries: tuple[str, ...]


BORDER = Field(
    "Land boundaries", "", ("{} Land boundaries km", "{} {} Geography Land boundaries", "{} border countries")
)
FIELDS = {
    "capital": Field(
        "Capital",
        "What is the capital of {}?",
        (
            "{} - Government - Capital: name",
            "{} Capital name geographic coordinates",
            "{} Government Capital name geographic coordinates time difference etymology",
            "{} {} Capital name geographic coordinates",
        ),
    ),
    "currency": Field("Exchange rates", "What is the currency of {}?", ("{} Exchange rates Currency per US dollar",)),
    "highest point": Field("Elevation", "What is the highest point of {}?", ("{} Elevation highest point",)),
    "internet code": Field(
        "Internet country code", "What is the internet country code of {}?", ("{} Internet country code",)
    ),
    "aircraft prefix": Field(
        "Civil aircraft registration country code prefix",
        "What is the civil aircraft registration prefix of {}?",
        ("{} Civil aircraft registration country code prefix",),
    ),
    "anthem": Field(
        "National anthem(s)",
        "What is the title of the national anthem of {}?",
        ("{} National anthem title", "{} National anthem"),
    ),
    "longest border": BORDER,
    "shortest border": BORDER,
    "export partner": Field("Exports - partners", "", ("{} Exports partners",)),
    "import partner": Field("Imports - partners", "", ("{} Imports partners",)),
}
CLUES = {
    "capital": "the country whose capital is {}",
    "highest point": "the country whose highest point is {}",
    "internet code": "the country whose internet country code is {}",
    "aircraft prefix": "the country whose civil aircraft registration prefix is {}",
    "anthem": 'the country whose national anthem is titled "{}"',
}
LINKS = {
    "longest border": "the country that shares the longest land border with {}",
    "shortest border": "the country that shares the shortest land border with {}",
    "export partner": "the largest export partner of {}",
    "import partner": "the largest import partner of {}",
}
# Share of the countries of each split; a question belongs to a split if all its countries do.
SHARES = {"train": 0.7, "validation": 0.1, "test": 0.2}


@dataclass(frozen=True, kw_only=True)
class Knowledge:
    """Facts by country and name, and the corpus that says them."""

    facts: dict[str, dict[str, Fact]] = field(default_factory=dict)
    passages: list[Passage] = field(default_factory=list)
    places: dict[tuple[str, str], list[Passage]] = field(default_factory=dict)

    def support(self, country: str, name: str) -> list[str]:
        """Ids of the passages that state a fact."""
        evidence = self.facts[country][name].evidence
        return [p.id for p in self.places.get((country, FIELDS[name].name), ()) if evidence in p.text]


def knowledge() -> Knowledge:
    """Read the package."""
    known = Knowledge()
    entries = countries()
    names = {country.name.lower(): country.name for country in entries}
    for country in entries:
        known.facts[country.name] = attributes(country) | links(country, names)
        for name, passage in passages_of(country, len(known.passages)):
            known.passages.append(passage)
            known.places.setdefault((country.name, name), []).append(passage)
    return known


def questions(known: Knowledge) -> Iterator[dict[str, Any]]:
    """All chains: clue to a country, perhaps a link to another, then what is asked of it."""
    for clue, phrase in CLUES.items():
        values = Counter(facts[clue].value.lower() for facts in known.facts.values() if clue in facts)
        for country, facts in known.facts.items():
            if clue not in facts or values[facts[clue].value.lower()] > 1:
                continue
            described = phrase.format(facts[clue].value)
            start = _hop(known, country, clue, f"Which is {described}?", country, facts[clue].value)
            yield from _asked(known, described, country, [start], (clue,))
            yield from _linked(known, described, country, [start], (clue,))
    for country in known.facts:
        yield from _linked(known, country, country, [], ())


def _linked(
    known: Knowledge, described: str, country: str, hops: list[dict[str, Any]], kinds: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    """Questions about the countries that ``country`` links to."""
    for link, phrase in LINKS.items():
        fact = known.facts[country].get(link)
        if fact is not None and fact.value != country:
            hop = _hop(known, country, link, f"Which is {phrase.format(country)}?", fact.value, country)
            yield from _asked(known, phrase.format(described), fact.value, [*hops, hop], (*kinds, link))


def _asked(
    known: Knowledge, described: str, country: str, hops: list[dict[str, Any]], kinds: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    """Questions for each attribute of ``country``, described in words."""
    for name, fact in known.facts[country].items():
        if name in LINKS or name in kinds:
            continue
        template = FIELDS[name].question
        steps = [*hops, _hop(known, country, name, template.format(country), fact.value, country)]
        if all(step["support"] for step in steps):
            yield {
                "question": template.format(described),
                "golden_answers": list(dict.fromkeys((fact.value, *fact.aliases, _ascii(fact.value)))),
                "type": ">".join((*kinds, name)),
                "decomposition": steps,
            }


def _hop(known: Knowledge, country: str, name: str, question: str, answer: str, given: str) -> dict[str, Any]:
    """A step as question files have it; ``given`` is what the step starts from."""
    return {
        "question": question,
        "answer": answer,
        "support": known.support(country, name),
        "evidence": known.facts[country][name].evidence,
        "queries": [*(query.replace("{}", given) for query in FIELDS[name].queries), question],
        "country": country,
    }


def _ascii(text: str) -> str:
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def split_of(names: Sequence[str]) -> dict[str, str]:
    """The split of each country, by chance with a seed that never changes."""
    order = sorted(names)
    random.Random(0).shuffle(order)
    splits: dict[str, str] = {}
    for split, share in SHARES.items():
        for name in order[len(splits) : len(splits) + round(share * len(order))]:
            splits[name] = split
    return {name: splits.get(name, "test") for name in order}


def write_factbook(folder: Path) -> Mapping[str, int]:
    """Write corpus.jsonl, train.jsonl, validation.jsonl and test.jsonl; the number of rows of each."""
    known = knowledge()
    splits = split_of(list(known.facts))
    rows: dict[str, list[dict[str, Any]]] = {split: [] for split in SHARES}
    for question in questions(known):
        touched = {splits[hop["country"]] for hop in question["decomposition"]}
        if len(touched) == 1:
            rows[touched.pop()].append(question)
    write_lines(folder / "corpus.jsonl", ({"id": p.id, "contents": p.contents} for p in known.passages))
    for split, found in rows.items():
        random.Random(1).shuffle(found)  # or the first tasks would all be of one kind
        write_lines(
            folder / f"{split}.jsonl",
            ({"id": f"{split}_{number}", "data_source": "factbook", **row} for number, row in enumerate(found)),
        )
    return {"corpus": len(known.passages), **{split: len(found) for split, found in rows.items()}}


def factbook_folder(folder: Path | None = None) -> Path:
    """The files of ``write_factbook``, made where they do not exist yet; None is a place in the cache."""

    def make(target: Path) -> None:
        write_factbook(target)

    return made_once(folder or cache_folder(f"factbook-{VERSION}"), make)
