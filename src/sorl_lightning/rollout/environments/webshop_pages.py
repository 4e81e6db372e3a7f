"""The shop's pages as text: what is on them, and where an action leads. Pure functions over a catalogue.

Worked example, the page of a search's results:

    Instruction: [SEP] i am looking for a blue speaker [SEP] Back to Search [SEP] Page 1 (Total results: 12)
    [SEP] Next > [SEP] B000000010 [SEP] Brand speaker [SEP] $53.0 [SEP] ...
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from sorl_lightning.rollout.environments.webshop_catalogue import Goal, Product

ACTION = re.compile(r"(search|click)\[(.+)\]", re.IGNORECASE | re.DOTALL)
SEPARATOR = " [SEP] "
RESULTS_PER_PAGE = 10
SUB_PAGES = ("description", "features", "reviews")
BACK, PREVIOUS, NEXT, BUY = "back to search", "< prev", "next >", "buy now"


class Page(NamedTuple):
    """What a page shows.

    Attributes:
        observation: its texts, joined by [SEP] as the public text environment does.
        has_search_bar: whether the page asks for a search.
        clickables: lower-case labels that can be clicked, in the page's order.
    """

    observation: str
    has_search_bar: bool
    clickables: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a customer stands.

    Attributes:
        kind: which page; "sub" is one of an article's texts, named by ``sub``.
        results: products found by the last search, best first.
        number: page of the results, from 1.
        options: values chosen for the article, by the option's name.
    """

    kind: Literal["search", "results", "item", "sub", "done"] = "search"
    results: tuple[str, ...] = ()
    number: int = 1
    asin: str = ""
    options: tuple[tuple[str, str], ...] = ()
    sub: str = ""

    def shown(self) -> tuple[str, ...]:
        """Products on this page of the results."""
        return self.results[(self.number - 1) * RESULTS_PER_PAGE : self.number * RESULTS_PER_PAGE]


def parsed_action(action: str) -> tuple[str, str] | None:
    """Verb and argument, lower case; None for anything else.

    >>> parsed_action("Click[Buy Now]"), parsed_action("buy it")
    (('click', 'buy now'), None)
    """
    match = ACTION.match(action.strip())
    return (match[1].lower(), match[2].strip().lower()) if match and match[2].strip() else None


def page_at(place: Place, goal: Goal, product: Product | None, found: Sequence[Product]) -> Page:
    """The page at ``place``.

    Args:
        product: the article of an item page and its texts.
        found: the articles on a page of results.
    """
    if place.kind == "search":
        return page(["WebShop", "Instruction:", goal.instruction], ["Search"], has_search_bar=True)
    head = ["Instruction:", goal.instruction, "Back to Search"]
    if place.kind == "results":
        more, total = place.number * RESULTS_PER_PAGE < len(place.results), len(place.results)
        moves = ["< Prev"] * (place.number > 1) + ["Next >"] * more
        listed = [text for article in found for text in (article.asin, article.name, article.tag)]
        texts = [*head, f"Page {place.number} (Total results: {total})", *moves, *listed]
        return page(texts, [], ["Back to Search", *moves, *(article.asin for article in found)])
    assert product is not None
    if place.kind == "sub":
        return page([*head, "< Prev", *sub_page(product, place.sub)], [], ["Back to Search", "< Prev"])
    choices = [text for name, values in product.options.items() for text in (name, *values)]
    texts = [*head, "< Prev", *choices, product.name, f"Price: {product.tag}", "Rating: N.A."]
    buttons = ["Description", "Features", "Reviews", "Buy Now"]
    values = [value for values in product.options.values() for value in values]
    return page([*texts, *buttons], [], ["Back to Search", "< Prev", *buttons, *values])


def page(
    texts: Sequence[str], buttons: Sequence[str], clickables: Sequence[str] = (), has_search_bar: bool = False
) -> Page:
    """A page of these texts, the last of which may be buttons."""
    return Page(SEPARATOR.join([*texts, *buttons]), has_search_bar, tuple(label.lower() for label in clickables))


def sub_page(product: Product, name: str) -> Sequence[str]:
    """The texts behind an article's buttons."""
    if name == "description":
        return [product.description or "No Description"]
    return [bullet for bullet in product.bullets if bullet] if name == "features" else ["No Reviews"]


def after_click(place: Place, label: str, product: Product | None) -> Place:
    """Where clicking ``label``, which is on the page, leads."""
    if label == BACK:
        return Place()
    if label == NEXT:
        return dataclasses.replace(place, number=place.number + 1)
    if label == PREVIOUS:
        if place.kind == "sub":
            return dataclasses.replace(place, kind="item", sub="")
        if place.kind == "item":
            return dataclasses.replace(place, kind="results", asin="", options=())
        return dataclasses.replace(place, number=place.number - 1)
    if place.kind == "results":
        return dataclasses.replace(place, kind="item", asin=label.upper(), options=())
    if label in SUB_PAGES:
        return dataclasses.replace(place, kind="sub", sub=label)
    if label == BUY:
        return dataclasses.replace(place, kind="done")
    assert product is not None
    name = next(name for name, values in product.options.items() if label in values)
    return dataclasses.replace(place, options=tuple((dict(place.options) | {name: label}).items()))
