"""The three kinds of shop: a generated one, one from the public data files, and a running WebShop server."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Protocol

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.interfaces import Interface
from sorl_lightning.rollout.environments.webshop_catalogue import Catalogue, Goal, Product, read_catalogue
from sorl_lightning.rollout.environments.webshop_expert import next_action
from sorl_lightning.rollout.environments.webshop_generated import generated_catalogue
from sorl_lightning.rollout.environments.webshop_pages import Page, Place, after_click, page_at
from sorl_lightning.rollout.environments.webshop_reward import purchase_score, token_set_ratio

EXTRA = "pip install 'sorl-lightning[webshop]'"
RESULTS = 50  # most products that a search finds


class Visit(Protocol):
    """A customer's stay: where it stands, and what an action leads to. Never changed, so that it can be shared."""

    @property
    def page(self) -> Page:
        """What the customer sees."""
        ...

    @property
    def score(self) -> float | None:
        """Of the purchase, in [0, 1]; None before it."""
        ...

    def act(self, verb: str, argument: str) -> Visit | None:
        """The stay after ``verb[argument]``; None where the page has no such label."""
        ...

    def expert_action(self) -> str:
        """A good action; LookupError where none is known."""
        ...


class Shop(Interface):
    """Goals by number, and visits with one of them in mind."""

    @abstractmethod
    def goal_count(self) -> int:
        """How many goals there are.

        Raises:
            ConfigurationError: the shop cannot be opened.
        """
        ...

    @abstractmethod
    def visit(self, goal: int) -> Visit:
        """A new visit for goal number ``goal``, at the search page."""
        ...


class LocalShop(Shop):
    """A shop in this process: search by BM25, pages and scores as the public shop has them."""

    @abstractmethod
    def load(self) -> Catalogue:
        """Products and goals, once."""
        ...

    @cached_property
    def catalogue(self) -> Catalogue:
        """Products and goals."""
        token_set_ratio()  # a missing extra is named now, not at the first purchase
        return self.load()

    @cached_property
    def index(self) -> Index:
        """The search engine over all products."""
        return Index(list(self.catalogue.products.values()))

    def goal_count(self) -> int:
        return len(self.catalogue.goals)

    def visit(self, goal: int) -> LocalVisit:
        return LocalVisit(shop=self, goal=self.catalogue.goals[goal], place=Place())


class GeneratedShop(LocalShop):
    """A made-up catalogue with goals of the public kind, the same for everyone with the same seed.

    Args:
        products: articles; each has three goals.
        seed: of everything in the catalogue.
    """

    def __init__(self, products: int = 1000, seed: int = 0) -> None:
        if products < 1:
            raise ConfigurationError(f"products is {products}, need at least 1")
        self.products = products
        self.seed = seed

    def load(self) -> Catalogue:
        return generated_catalogue(self.products, self.seed)


class ShopFiles(LocalShop):
    """The files that WebShop's set-up script downloads.

    Args:
        items: items_shuffle.json or items_shuffle_1000.json.
        attributes: items_ins_v2.json or items_ins_v2_1000.json.
        human: items_human_ins.json, people's own instructions; None makes one goal for each choice of options.
        max_products: the first so many products; None takes all.
    """

    def __init__(self, items: str, attributes: str, human: str | None = None, max_products: int | None = None) -> None:
        self.items = items
        self.attributes = attributes
        self.human = human
        self.max_products = max_products

    def load(self) -> Catalogue:
        return read_catalogue(self.items, self.attributes, self.human, self.max_products)


class Index:
    """BM25 over a product's texts; the words of a query in any order."""

    def __init__(self, products: Sequence[Product]) -> None:
        try:
            import bm25s
        except ImportError as error:
            raise ConfigurationError(f"bm25s is not installed; install the extra: {EXTRA}") from error
        self._tokenize: Any = bm25s.tokenize
        self._asins = [product.asin for product in products]
        self._index = bm25s.BM25()
        self._index.index(self._tokens([text_of(product) for product in products]), show_progress=False)
        self.search = lru_cache(maxsize=16_384)(self._search)

    def _tokens(self, texts: list[str]) -> Any:
        return self._tokenize(texts, stopwords="en", return_ids=False, show_progress=False)

    def _search(self, query: str) -> tuple[str, ...]:
        (words,) = self._tokens([query])
        if not words:
            return ()
        found, scores = self._index.retrieve([words], k=min(RESULTS, len(self._asins)), show_progress=False)
        return tuple(self._asins[row] for row, score in zip(found[0], scores[0], strict=True) if score > 0)


def text_of(product: Product) -> str:
    """What a search looks at."""
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options.items())
    return " ".join((product.name, product.description, *product.bullets[:1], options)).lower()


@dataclass(frozen=True, kw_only=True)
class LocalVisit:
    """A visit to a shop in this process."""

    shop: LocalShop
    goal: Goal
    place: Place

    @property
    def product(self) -> Product | None:
        """The article that the customer looks at."""
        return self.shop.catalogue.products.get(self.place.asin)

    @property
    def page(self) -> Page:
        """What the customer sees; after the purchase, nothing."""
        if self.place.kind == "done":
            return Page("", False, ())
        found = [self.shop.catalogue.products[asin] for asin in self.place.shown()]
        return page_at(self.place, self.goal, self.product, found)

    @property
    def score(self) -> float | None:
        """Of the purchase."""
        if self.place.kind != "done" or self.product is None:
            return None
        wanted = self.shop.catalogue.products[self.goal.asin]
        return purchase_score(self.product, wanted, self.goal, dict(self.place.options).values())

    def act(self, verb: str, argument: str) -> LocalVisit | None:
        """Search from anywhere, as the public shop allows; click what is on the page."""
        if verb == "search":
            place = Place(kind="results", results=self.shop.index.search(argument))
        elif argument in self.page.clickables:
            place = after_click(self.place, argument, self.product)
        else:
            return None
        return LocalVisit(shop=self.shop, goal=self.goal, place=place)

    def expert_action(self) -> str:
        """The way to a score of 1; see ``webshop_expert``."""
        return next_action(self.shop.catalogue, self.shop.index.search, self.goal, self.place)
