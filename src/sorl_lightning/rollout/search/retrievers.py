"""Who answers queries: an index in this process, or a server that speaks Search-R1's protocol."""

from __future__ import annotations

import asyncio
import hashlib
import json
import urllib.error
import urllib.request
from abc import abstractmethod
from collections.abc import Collection, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from sorl_lightning.cache import cache_folder, made_once
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.interfaces import Interface
from sorl_lightning.rollout.search.corpus import Passage, passage_of, read_corpus

WORD = r"\.?\w+"  # also single letters, and ".to", which is no "to"


class Retriever(Interface):
    """Finds passages for a query."""

    @abstractmethod
    def check(self) -> Collection[str] | None:
        """Make sure that it works, before any rollout; the ids of its passages, None where it cannot list them.

        Raises:
            ConfigurationError: it does not work.
        """
        ...

    @abstractmethod
    async def search(self, query: str, topk: int) -> list[Passage]:
        """The best ``topk`` passages, best first; fewer where there are no more."""
        ...


class BM25(Retriever):
    """BM25 over a corpus file, in this process, by bm25s; the index is kept in the cache.

    Args:
        corpus: jsonl file in Search-R1's form.
    """

    def __init__(self, corpus: str) -> None:
        self.corpus = corpus

    def check(self) -> Collection[str]:
        """Read the corpus, and its index, which is made at first use."""
        return _index(self.corpus).ids

    async def search(self, query: str, topk: int) -> list[Passage]:
        """Best passages by BM25; passages without a word of the query are left out."""
        return _index(self.corpus).search(query, topk)


class _Index:
    """A corpus in memory and its bm25s index."""

    def __init__(self, corpus: str) -> None:
        try:
            import bm25s
        except ImportError as error:
            raise ConfigurationError("BM25 needs bm25s: pip install 'sorl-lightning[search]'") from error
        self._bm25s = bm25s
        self.passages = read_corpus(corpus)
        self.ids = {passage.id for passage in self.passages}
        digest = hashlib.blake2b(Path(corpus).read_bytes(), digest_size=16)
        digest.update(f"{bm25s.__version__} {WORD}".encode())
        self._model = bm25s.BM25.load(made_once(cache_folder("bm25", digest.hexdigest()), self._make))
        self.search = lru_cache(maxsize=65_536)(self._search)  # siblings ask the same things

    def _tokens(self, texts: Sequence[str], ids: bool = True) -> Any:
        return self._bm25s.tokenize(
            list(texts), stopwords="en", token_pattern=WORD, return_ids=ids, show_progress=False
        )

    def _make(self, folder: Path) -> None:
        model = self._bm25s.BM25(backend="numpy")
        model.index(self._tokens([passage.contents for passage in self.passages]), show_progress=False)
        model.save(folder)

    def _search(self, query: str, topk: int) -> list[Passage]:
        words = self._tokens([query], ids=False)
        known = [[word for word in words[0] if word in self._model.vocab_dict]]
        if not known[0]:
            return []
        count = min(topk, len(self.passages))
        found, scores = self._model.retrieve(known, k=count, show_progress=False, backend_selection="numpy")
        pairs = zip(found[0].tolist(), scores[0].tolist(), strict=True)
        return [self.passages[number] for number, score in pairs if score > 0]


@lru_cache(maxsize=4)
def _index(corpus: str) -> _Index:
    return _Index(corpus)


class HTTPRetriever(Retriever):
    """A retrieval server of Search-R1's kind: POST {"queries": [...], "topk": 3, "return_scores": true}.

    Args:
        url: of the endpoint.
        timeout: seconds to wait for an answer.
    """

    def __init__(self, url: str = "http://127.0.0.1:8000/retrieve", timeout: float = 30.0) -> None:
        self.url = url
        self.timeout = timeout

    def check(self) -> None:
        """Ask once.

        Raises:
            ConfigurationError: no answer, or one of another form.
        """
        try:
            self._ask("country", 1)
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise ConfigurationError(f"the retriever at {self.url} does not answer as it should: {error!r}") from error

    async def search(self, query: str, topk: int) -> list[Passage]:
        """The server's passages. What it raises is the environment's failure, never a reward."""
        return await asyncio.to_thread(self._ask, query, topk)

    def _ask(self, query: str, topk: int) -> list[Passage]:
        body = json.dumps({"queries": [query], "topk": topk, "return_scores": True}).encode()
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(300).decode(errors="replace")
            raise OSError(f"HTTP {error.code} from {self.url}: {said}") from None
        rows = answer["result"][0]
        return [passage_of({"id": "", **row.get("document", row)}) for row in rows[:topk]]
