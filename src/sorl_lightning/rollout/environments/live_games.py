"""Games that can only be played forward, as a function of the actions so far."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
G = TypeVar("G")
Actions = tuple[str, ...]


class LiveGames(Generic[K, G]):
    """Keeps the games played last at their latest state, so that an episode need hold none that it must give back.

    An episode whose game has made room for others is played again from its start. Threads may play side by side.

    Args:
        start: a new game of this key.
        play: act in a game.
        end: give a game back.
        capacity: games kept; at least as many as episodes that run at once, or most steps replay an episode.
    """

    def __init__(
        self, start: Callable[[K], G], play: Callable[[G, str], None], end: Callable[[G], None], capacity: int = 256
    ) -> None:
        self.start = start
        self.play = play
        self.end = end
        self.capacity = capacity
        self._kept: OrderedDict[tuple[K, Actions], G] = OrderedDict()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def after(self, key: K, actions: Actions) -> Iterator[G]:
        """The game of ``key`` after ``actions``; nobody else plays it meanwhile."""
        with self._lock:
            known = next((n for n in range(len(actions), -1, -1) if (key, actions[:n]) in self._kept), None)
            game = None if known is None else self._kept.pop((key, actions[:known]))
        if game is None:
            game = self.start(key)
        for action in actions[known or 0 :]:
            self.play(game, action)
        yield game
        with self._lock:
            outdated = [self._kept.pop((key, actions))] if (key, actions) in self._kept else []
            self._kept[key, actions] = game
            while len(self._kept) > self.capacity:
                outdated.append(self._kept.popitem(last=False)[1])
        for old in outdated:
            self.end(old)
