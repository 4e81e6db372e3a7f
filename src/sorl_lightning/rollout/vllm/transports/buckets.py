"""Weights that travel bucket by bucket, so that the gathered tensors of one bucket are all that is ever held."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator

from torch import Tensor

from sorl_lightning.errors import EngineOutage
from sorl_lightning.rollout.vllm.transports.transport import Post, WeightTransport

Bucket = list[tuple[str, Tensor]]
ALREADY = "already active"  # vLLM's words for a second start


class BucketTransport(WeightTransport):
    """An update of vLLM's own: start, one update a bucket, finish with a version."""

    @abstractmethod
    def send(self, bucket: Bucket, post: Post) -> None:
        """Have all servers load the bucket; returns when they have."""
        ...

    def deliver(self, weights: Iterable[tuple[str, Tensor]], name: str, post: Post, bucket_bytes: int) -> None:
        """Bucket by bucket; servers have the new weights when all have arrived."""
        start(post)
        for bucket in buckets(weights, bucket_bytes):
            self.send(bucket, post)
        post("/finish_weight_update", [{"weight_version": name}]).result()


def start(post: Post) -> None:
    """Start an update. One that somebody has left open is ended first, by a bucket that makes no sense."""
    try:
        post("/start_weight_update", [None]).result()
    except EngineOutage as error:
        if ALREADY not in str(error):
            raise
        with contextlib.suppress(EngineOutage):
            post("/update_weights", [{"update_info": {"abandoned": True}}]).result()
        post("/start_weight_update", [None]).result()


def buckets(weights: Iterable[tuple[str, Tensor]], size: int) -> Iterator[Bucket]:
    """Weights in order, ``size`` bytes at a time or one tensor where it is larger. A bucket is emptied once used.

    Only the tensors of one bucket are ever held.

    >>> import torch
    >>> [[name for name, _ in bucket] for bucket in buckets([("a", torch.zeros(2)), ("b", torch.zeros(3))], size=16)]
    [['a'], ['b']]
    """
    bucket: Bucket = []
    held = 0
    for name, tensor in weights:
        length = tensor.numel() * tensor.element_size()
        if bucket and held + length > size:
            yield bucket
            bucket.clear()
            held = 0
        bucket.append((name, tensor))
        held += length
        del tensor
    if bucket:
        yield bucket
        bucket.clear()
