"""Things that are made once and kept: converted models, indexes, built corpora."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

VARIABLE = "SORL_CACHE"


def cache_folder(*parts: str) -> Path:
    """A folder below ``$SORL_CACHE``, or below ``~/.cache/sorl-lightning`` where that is not set; it need not exist."""
    return Path(os.environ.get(VARIABLE) or Path.home() / ".cache" / "sorl-lightning").joinpath(*parts)


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """``folder``, filled by ``make`` where it does not exist yet. It appears complete or not at all.

    Of two processes that make it at the same time the first wins, and the other takes what is there.
    """
    if folder.exists():
        return folder
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    unfinished.mkdir(parents=True)
    try:
        make(unfinished)
        unfinished.rename(folder)
    except OSError:
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder
