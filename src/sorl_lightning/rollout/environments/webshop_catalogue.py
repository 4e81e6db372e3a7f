"""Products and goals of WebShop, and how the public data files are read (Yao et al. 2022, arXiv:2207.01206)."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sorl_lightning.errors import ConfigurationError

# The price limit of a goal is drawn from the first few of these above the product's price, dollars.
PRICE_LIMITS = tuple(10.0 * tens for tens in range(1, 100))
NO_PRICE_LIMIT = 1_000_000.0
PRODUCT_KEYS = (
    "asin", "name", "category", "query", "product_category", "full_description", "small_description", "pricing",
    "customization_options",
)  # fmt: skip
GOAL_ORDER_SEED = 233


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One article of the shop.

    Attributes:
        asin: its number, at most 10 characters.
        query: the search under which the catalogue was collected.
        product_category: path of categories, parted by "›".
        price: dollars; tag: the price as the pages show it.
        options: values by the option's name, lower case.
    """

    asin: str
    name: str
    category: str
    query: str
    product_category: str
    description: str
    bullets: tuple[str, ...]
    price: float
    tag: str
    attributes: tuple[str, ...] = ()
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a customer wants.

    Attributes:
        asin: a product that fulfils it.
        options: values that have to be chosen.
        price_upper: highest price, dollars.
    """

    asin: str
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    price_upper: float


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """Products by number, and goals in their fixed order."""

    products: Mapping[str, Product]
    goals: Sequence[Goal]


def read_catalogue(items: str, attributes: str, human: str | None, max_products: int | None) -> Catalogue:
    """The catalogue in the files that WebShop's set-up script downloads.

    Goals are the human instructions where their file is given, else one for each combination of a product's options.

    Raises:
        ConfigurationError: a file is missing, empty or of another schema.
    """
    extracted = read_json(attributes, "attributes", dict)
    instructions = None if human is None else read_json(human, "human", dict)
    products: dict[str, Product] = {}
    goals: list[Goal] = []
    for record in read_json(items, "items", list)[:max_products]:
        asin = str(record.get("asin")) if isinstance(record, dict) else "None"
        missing = [key for key in PRODUCT_KEYS if not isinstance(record, dict) or key not in record]
        if missing:
            raise ConfigurationError(f"items: product {asin} of {items} has no {', '.join(missing)}")
        if asin == "nan" or len(asin) > 10 or asin in products:  # as the shop itself skips them
            continue
        about = extracted.get(asin, {})
        product = products[asin] = product_of(record, about.get("attributes") or ["DUMMY_ATTR"])
        goals += synthetic_goals(product, about) if instructions is None else human_goals(product, instructions)
    if not goals:
        raise ConfigurationError(f"items: no product of {items} has an instruction in {human or attributes}")
    random.Random(GOAL_ORDER_SEED).shuffle(goals)
    return Catalogue(products=products, goals=goals)


def read_json(path: str, setting: str, kind: type) -> Any:
    """A non-empty JSON list or object.

    Raises:
        ConfigurationError: there is no such file, or it holds something else.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigurationError(f"{setting}: there is no file {path}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{setting}: {path} is not JSON in UTF-8: {error}") from error
    if not isinstance(content, kind) or not content:
        name = "list of products" if kind is list else "mapping from asin"
        raise ConfigurationError(f"{setting}: {path} must hold a non-empty {name}, it holds {str(content)[:40]!r}")
    return content


def product_of(record: Mapping[str, Any], attributes: Sequence[str]) -> Product:
    """One product of the items file."""
    bullets = record["small_description"]
    prices = prices_of(record["pricing"])
    options = {
        name.lower(): tuple(value["value"].strip().replace("/", " | ").lower() for value in values)
        for name, values in (record["customization_options"] or {}).items()
        if values
    }
    return Product(
        asin=record["asin"],
        name=record["name"],
        category=record["category"],
        query=record["query"].lower().strip(),
        product_category=record["product_category"],
        description=record["full_description"] or "",
        bullets=tuple(bullets) if isinstance(bullets, list) else (str(bullets),),
        price=prices[0] if len(prices) == 1 else random.Random(record["asin"]).uniform(*prices[:2]),
        tag=" to ".join(f"${price}" for price in prices[:2]),
        attributes=tuple(attributes),
        options=options,
    )


def prices_of(pricing: str | None) -> list[float]:
    """Dollars in a price tag.

    >>> prices_of("$5.00$1,009.99"), prices_of(None)
    ([5.0, 1009.99], [100.0])
    """
    found = [float(re.sub(r"[^\d.]", "", price)) for price in (pricing or "").split("$")[1:]]
    return found or [100.0]


def price_limit(product: Product, chance: random.Random) -> tuple[float, str]:
    """The goal's price limit, and the words that state it.

    The shop draws it from an unseeded generator; here it depends on the product alone.
    """
    above = [price for price in PRICE_LIMITS if price > product.price][:4]
    if len(above) < 2:
        return NO_PRICE_LIMIT, ""
    limit = max(chance.sample(above, 2))
    return limit, f", and price lower than {limit:.2f} dollars"


def human_goals(product: Product, instructions: Mapping[str, Any]) -> Iterator[Goal]:
    """Goals that people wrote for the product."""
    chance = random.Random(product.asin)
    for written in instructions.get(product.asin, ()):
        if not written["instruction_attributes"]:
            continue
        limit, words = price_limit(product, chance)
        options = written["instruction_options"]
        yield Goal(
            asin=product.asin,
            instruction=written["instruction"].strip(".") + words,
            attributes=tuple(written["instruction_attributes"]),
            options=tuple(options.values() if isinstance(options, dict) else options),
            price_upper=limit,
        )


def synthetic_goals(product: Product, about: Mapping[str, Any]) -> Iterator[Goal]:
    """One goal for each combination of the product's options."""
    if not about.get("instruction") or not about.get("instruction_attributes"):
        return
    limit, words = price_limit(product, random.Random(product.asin))
    combinations: list[dict[str, str]] = [{}]
    for name in sorted(product.options):
        combinations = [{**chosen, name: value} for chosen in combinations for value in product.options[name]]
    for chosen in combinations:
        listed = ", and ".join(f"{name}: {value}" for name, value in chosen.items())
        yield Goal(
            asin=product.asin,
            instruction=about["instruction"] + (f" with {listed}" if listed else "") + words,
            attributes=tuple(about["instruction_attributes"]),
            options=tuple(chosen.values()),
            price_upper=limit,
        )
