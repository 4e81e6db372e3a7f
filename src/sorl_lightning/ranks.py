"""The processes of a run, and what they must agree on. With one process, everything here is the identity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from sorl_lightning.errors import ConfigurationError, RolloutError

T = TypeVar("T")


def count() -> int:
    """Number of processes."""
    return dist.get_world_size() if _several() else 1


def index() -> int:
    """Number of this process, from 0."""
    return dist.get_rank() if _several() else 0


def gather(value: T) -> list[T]:
    """Every rank's small object, in the order of the ranks."""
    if not _several():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def total(values: Tensor) -> Tensor:
    """Sum over the ranks of a tensor that has the same shape on all of them."""
    if not _several():
        return values
    summed = values.detach().to(_device(), copy=True)
    dist.all_reduce(summed)
    return summed.to(values.device)


def pooled(values: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """``function`` of the one-dimensional ``values`` of all ranks together; this rank's part of the result."""
    shares = gather(values)
    own = dist.get_rank() if _several() else 0
    return function(torch.cat(shares)).split([len(share) for share in shares])[own]


def anywhere(flag: bool) -> bool:
    """Whether ``flag`` is set on some rank: what skips work is decided so, or sharded passes wait for ever."""
    return bool(total(torch.tensor(float(flag))) > 0)


def together(work: Callable[[], T]) -> T:
    """Run ``work``, and fail on every rank where one has failed, with that rank's sentence.

    Raises:
        ConfigurationError: as the first rank that raised it.
        RolloutError: as the first rank that raised it.
    """
    if not _several():
        return work()
    error: Exception | None = None
    result: Any = None
    try:
        result = work()
    except (ConfigurationError, RolloutError) as raised:
        error = raised
    failed = [(type(e), str(e)) for e in gather(error) if e is not None]
    if error is not None:
        raise error
    if failed:
        kind, sentence = failed[0]
        raise kind(sentence)
    return result


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend() else torch.device("cpu")
