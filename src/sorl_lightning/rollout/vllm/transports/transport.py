"""What a way of weights into servers has to offer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.interfaces import Interface
from sorl_lightning.rollout.vllm.wire import Server

Post = Callable[[str, Sequence[dict[str, Any] | None]], Future[Any]]
"""Ask all servers the same route, with one body for each or one for all; the future fails with the first of them."""


class WeightTransport(Interface):
    """Carries weights into all servers while they are paused. Called from the training thread."""

    @property
    @abstractmethod
    def backend(self) -> str | None:
        """The weight-transfer backend that the servers must have been started with; None: any."""
        ...

    @abstractmethod
    def connect(self, post: Post, workers: Sequence[int], timeout: float) -> None:
        """Meet the servers, before the first update and again after a failed one.

        Args:
            post: to the servers.
            workers: of each server.
            timeout: seconds that one request may take.
        """
        ...

    @abstractmethod
    def deliver(self, weights: Iterable[tuple[str, Tensor]], name: str, post: Post, bucket_bytes: int) -> None:
        """Have all servers take the weights, and call them ``name`` from then on.

        Args:
            weights: as ``select`` has given them.
            name: of these weights.
            post: to the servers.
            bucket_bytes: most bytes of gathered weights to hold at a time, or one tensor where it is larger.
        """
        ...

    @abstractmethod
    def close(self) -> None:
        """Give back files and connections. Safe to call twice."""
        ...

    def select(self, policy: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """What travels of the policy: all ``weights``, unless the transport says otherwise. All ranks read them."""
        return iter(weights)

    def served_as(self, model: str) -> str:
        """Name under which requests reach the weights, on servers that serve ``model``."""
        return model

    def check(self, server: Server) -> None:
        """Refuse a server that takes weights in another way, or in none."""
        if server.backend != self.backend:
            raise ConfigurationError(
                f"{server.client.url} takes weights by {server.backend!r} and VLLMEngine.transport sends them by "
                f'{self.backend!r}: start it with --weight-transfer-config \'{{"backend": "{self.backend}"}}\' and '
                "--worker-extension-cls sorl_lightning.vllm_plugin.weight_transfer.WorkerExtension"
            )
