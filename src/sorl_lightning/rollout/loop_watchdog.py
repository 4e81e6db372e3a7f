"""Who holds up an event loop, and for how long."""

from __future__ import annotations

import asyncio
import logging
import selectors
import sys
import sysconfig
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NamedTuple

logger = logging.getLogger(__name__)

THRESHOLD = 0.1  # seconds without an answer that are a block
NOTICED = 0.09  # seconds after which the stack is looked at
SAMPLING = 0.01  # seconds between two looks at the stack of a block
PACKAGE = str(Path(__file__).parents[1])
STANDARD_LIBRARY = sysconfig.get_path("stdlib")
INSTALLED = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


class Place(NamedTuple):
    """A function in which a loop stood still."""

    file: str
    function: str


@dataclass(kw_only=True)
class Blocks:
    """What happened at one place.

    Attributes:
        count: how often the loop stood still there.
        longest: the longest time of them, seconds.
        said: levels of the log at which it was named.
    """

    count: int = 0
    longest: float = 0.0
    said: set[int] = field(default_factory=set)


@dataclass(kw_only=True)
class _Sighting:
    """What was seen of one block while it lasted.

    Attributes:
        looks: how often the stack was looked at.
        places: how often the loop was at each.
        lines: where it was in each at first.
        tasks: that it was at.
    """

    looks: int = 0
    places: Counter[Place] = field(default_factory=Counter)
    lines: dict[Place, str] = field(default_factory=dict)
    tasks: set[int] = field(default_factory=set)

    def blames(self, seconds: float) -> bool:
        """Whether one step took so long by itself. Where looks are missing, this thread could not run either."""
        return len(self.tasks) == 1 and 2 * self.looks >= (seconds - NOTICED) / SAMPLING - 1


class LoopWatchdog:
    """Notices each time that the loop of a thread does not answer for 0.1 s, and says once a place who did it.

    A step that took so long by itself is a warning. What nobody can be blamed for is information: many short steps in
    a row, a pause of the whole process (garbage collection, a busy machine).

    The loop notes when it begins to work and when it waits for work again; a thread looks now and then whether it has
    been working for too long, and if so, what at. Between blocks this costs the loop two clock readings a pass, and the
    thread about 11 looks a second.

    Attributes:
        places: blocks by place; those of place None were over before anybody could look.
        longest: longest time without an answer since it was last taken, seconds, be it a block or not.
    """

    def __init__(self) -> None:
        self.places: dict[Place | None, Blocks] = {}
        self.longest = 0.0
        self._since: float | None = None  # when the loop began its present pass; None while it waits for work
        self._ended: dict[float, float] = {}  # ends of passes that were blocks, by their beginnings
        self._stopping = threading.Event()
        self._watcher: threading.Thread | None = None

    @property
    def count(self) -> int:
        """Times that the loop stood still."""
        return sum(blocks.count for blocks in self.places.values())

    def take_longest(self) -> float:
        """``longest``, which begins anew."""
        longest, self.longest = self.longest, 0.0
        return longest

    def new_loop(self) -> asyncio.AbstractEventLoop:
        """A loop that can be watched."""
        return asyncio.SelectorEventLoop(_NotingSelector(self))

    def start(self, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
        """Watch ``loop``, one of ``new_loop`` that runs in ``thread``, until ``stop``."""
        self._stopping.clear()
        self._watcher = threading.Thread(target=self._watch, args=(loop, thread), name="loop watchdog", daemon=True)
        self._watcher.start()

    def stop(self) -> None:
        """End the thread. Safe to call twice."""
        self._stopping.set()
        if self._watcher is not None:
            self._watcher.join()
            self._watcher = None

    def waits(self) -> None:
        """The loop has nothing left to do in this pass. Called in its thread."""
        since, self._since = self._since, None
        if since is None:
            return
        now = time.perf_counter()
        self.longest = max(self.longest, now - since)
        if now - since > THRESHOLD:
            self._ended[since] = now

    def works(self) -> None:
        """The loop begins a pass. Called in its thread."""
        self._since = time.perf_counter()

    def _watch(self, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
        while not self._stopping.is_set():
            since = self._since
            age = 0.0 if since is None else time.perf_counter() - since
            if since is not None and age >= NOTICED:
                self._note(since, self._follow(since, loop, thread))
            else:
                # Whatever begins meanwhile is not older than this when the wait is over.
                self._stopping.wait(NOTICED - age)
            self._note_unseen()
        self._note_unseen()

    def _follow(self, since: float, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> _Sighting:
        """Look at the stack until the pass that began at ``since`` is over."""
        seen = _Sighting()
        while self._since == since and not self._stopping.is_set():
            seen.looks += 1
            frame = sys._current_frames().get(thread.ident or 0)
            found = None if frame is None else _own_frame(frame)
            if found is not None:
                place = Place(found.f_code.co_filename, _name(found))
                seen.places[place] += 1
                seen.lines.setdefault(place, f"{place.file}:{found.f_lineno}")
                seen.tasks.add(id(asyncio.current_task(loop)))
            time.sleep(SAMPLING)
        return seen

    def _note_unseen(self) -> None:
        for since in list(self._ended):  # blocks that this thread came too late for
            self._note(since, _Sighting())

    def _note(self, since: float, seen: _Sighting) -> None:
        end = self._ended.pop(since, None)
        if end is None:
            return  # long enough to be looked at, not to be a block
        place = seen.places.most_common(1)[0][0] if seen.places else None
        blocks = self.places.setdefault(place, Blocks())
        blocks.count += 1
        blocks.longest = max(blocks.longest, end - since)
        level = logging.WARNING if seen.blames(end - since) else logging.INFO
        if level not in blocks.said:
            blocks.said.add(level)
            logger.log(level, "%s", _message(place, seen, end - since))


class _NotingSelector(selectors.DefaultSelector):
    """Tells the watchdog when its loop waits and when it works."""

    def __init__(self, watchdog: LoopWatchdog) -> None:
        super().__init__()
        self._watchdog = watchdog

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._watchdog.waits()
        try:
            return super().select(timeout)
        finally:
            self._watchdog.works()


def _message(place: Place | None, seen: _Sighting, seconds: float) -> str:
    where = "in code that was over before it could be looked at"
    if place is not None:
        where = f"in {place.function} ({seen.lines[place]})"
        if len(seen.tasks) > 1:
            where += f" and around, in steps of {len(seen.tasks)} or more tasks in a row"
    still = f"the event loop stood still for {seconds:.2f} s {where}"
    if not seen.blames(seconds):
        return still
    return (
        f"{still}: every environment and connection in it waited. Make the method a coroutine that awaits what takes "
        "long, or move the work to a thread or a process. Further blocks there are counted, not logged"
    )


def _own_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the environment's code or this package's; failing that, of any library's."""
    other = None
    while frame is not None:
        file = frame.f_code.co_filename
        installed = file.startswith(INSTALLED)
        own = file.startswith(PACKAGE) and file != __file__
        if own or not (installed or file == __file__ or file.startswith((STANDARD_LIBRARY, "<frozen"))):
            break
        if installed and other is None:
            other = frame
        frame = frame.f_back
    return frame or other


def _name(frame: FrameType) -> str:
    code = frame.f_code
    return getattr(code, "co_qualname", code.co_name)  # Python 3.11 knows the class too
