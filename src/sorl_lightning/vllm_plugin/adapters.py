"""Adapters that were loaded in place are read once, and not again at every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager


def read_once(apply: Callable[[Any, set[Any]], None]) -> Callable[[Any, set[Any]], None]:
    """Before each step vLLM loads the adapters of the turns in it, unless it has them.

    The turns of an adapter that was loaded in place still say "in place", so it would read the adapter's files at every
    step; they need not be there any more. What is loaded by request, and not by a step, stays as it is.
    """

    def applied(manager: Any, requests: set[Any]) -> None:
        apply(manager, {msgspec.structs.replace(request, load_inplace=False) for request in requests if request})

    return applied


LRUCacheWorkerLoRAManager._apply_adapters = read_once(LRUCacheWorkerLoRAManager._apply_adapters)
