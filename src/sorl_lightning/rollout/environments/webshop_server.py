"""A running WebShop server, visited over HTTP as a browser would."""

from __future__ import annotations

import itertools
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import NamedTuple

from typing_extensions import override

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.environments.webshop_pages import SEPARATOR, Page
from sorl_lightning.rollout.environments.webshop_shops import Shop

UNSEEN = {"style", "script", "head", "title", "meta"}
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
SCORE_LABEL = "Your score (min 0.0, max 1.0)"
HUMAN_GOALS = 12_087  # of the public data
_visits = itertools.count()


class Link(NamedTuple):
    """Where a label leads, and whether as a form."""

    url: str
    posted: bool


@dataclass(kw_only=True)
class ReadPage:
    """What a page's HTML holds: visible texts, links by lower-case label, the search form's address."""

    texts: list[str] = field(default_factory=list)
    links: dict[str, Link] = field(default_factory=dict)
    search: str | None = None


class PageReader(HTMLParser):
    """Reads the shop's own pages: buttons of class btn in forms, links of class product-link, radio buttons."""

    def __init__(self) -> None:
        super().__init__()
        self.read = ReadPage()
        self._open: list[str] = []
        self._form = ""
        self._label: list[str] | None = None
        self._target = Link("", False)

    @override
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        classes = values.get("class", "").split()
        if tag not in VOID:
            self._open.append(tag)
        if tag == "form":
            self._form = values.get("action", "")
        elif "btn" in classes:
            self._label, self._target = [], Link(self._form, True)
        elif "product-link" in classes:
            self._label, self._target = [], Link(values.get("href", ""), False)
        elif tag == "input" and values.get("type") == "radio":
            self.read.links[values.get("value", "").lower()] = Link(values.get("data-url", ""), False)
        elif values.get("id") == "search_input":
            self.read.search = self._form

    @override
    def handle_endtag(self, tag: str) -> None:
        if tag in ("button", "a") and self._label is not None:
            self.read.links["".join(self._label).strip().lower()] = self._target
            self._label = None
        if tag in self._open:
            while self._open.pop() != tag:
                pass

    @override
    def handle_data(self, data: str) -> None:
        if self._label is not None:
            self._label.append(data)
        if data.strip() and not UNSEEN & set(self._open):
            self.read.texts.append(" ".join(data.split()))


class ShopServer(Shop):
    """The shop's own web application, started by the user.

    Args:
        url: address, such as http://localhost:3000.
        goals: how many goals it has; the public data have 12,087 human ones.
        timeout: longest wait for a page, seconds.
    """

    def __init__(self, url: str = "http://localhost:3000", goals: int = HUMAN_GOALS, timeout: float = 30.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigurationError(f"url is {url!r}, it needs to start with http:// or https://")
        self.url = url.rstrip("/")
        self.goals = goals
        self.timeout = timeout

    def goal_count(self) -> int:
        try:
            self.visit(0)
        except OSError as error:
            raise ConfigurationError(f"url: no WebShop server answers at {self.url}: {error}") from error
        return self.goals

    def visit(self, goal: int) -> ServerVisit:
        # The server picks goal N for a session whose name holds "fixed" and ends in _N, and keeps it by that name.
        return self.open(Link(f"/fixed-{os.getpid()}-{next(_visits)}_{goal}", False))

    def open(self, link: Link, form: Mapping[str, str] | None = None) -> ServerVisit:
        """The page behind a link.

        Raises:
            OSError: the server refuses, or does not answer in time.
        """
        address = urllib.parse.urljoin(self.url + "/", link.url)
        data = urllib.parse.urlencode(form or {}).encode() if link.posted else None
        with urllib.request.urlopen(address, data, timeout=self.timeout) as response:
            text = response.read().decode("utf-8", errors="replace")
        reader = PageReader()
        reader.feed(text)
        return ServerVisit(shop=self, read=reader.read)


@dataclass(frozen=True, kw_only=True)
class ServerVisit:
    """A page that the server has sent."""

    shop: ShopServer
    read: ReadPage

    @property
    def page(self) -> Page:
        """Its texts and labels."""
        labels = tuple(label for label in self.read.links if label != "search")
        return Page(SEPARATOR.join(self.read.texts), self.read.search is not None, labels)

    @property
    def score(self) -> float | None:
        """Of the purchase, as the last page states it."""
        texts = self.read.texts
        stated = next((n for n, text in enumerate(texts) if text == SCORE_LABEL), None)
        return None if stated is None else float(texts[stated + 1])

    def act(self, verb: str, argument: str) -> ServerVisit | None:
        """Fill in the page's search bar, or follow a label on the page."""
        if verb == "search":
            if self.read.search is None:
                return None
            return self.shop.open(Link(self.read.search, True), {"search_query": argument})
        if argument == "search" or argument not in self.read.links:
            return None
        return self.shop.open(self.read.links[argument])

    def expert_action(self) -> str:
        """None: only the server knows its goals."""
        raise LookupError("a WebShop server does not tell what it looks for; use GeneratedShop or ShopFiles")
