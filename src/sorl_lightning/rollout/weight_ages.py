"""How old the weights are that sampled a trajectory."""

from __future__ import annotations

from collections.abc import Mapping

from sorl_lightning.errors import RolloutError
from sorl_lightning.types import Trajectory


class WeightAges:
    """Versions of weights that an engine was given, and the collection at whose start each came.

    Args:
        begun_by: the collection of each version so far.
    """

    def __init__(self, begun_by: Mapping[int, int] | None = None) -> None:
        self.begun_by = dict(begun_by or {})

    def note(self, version: int, collection: int) -> None:
        """Note that the engine has weights ``version`` from the start of ``collection`` on."""
        self.begun_by[version] = collection

    def forget_before(self, collection: int) -> None:
        """Drop what came before ``collection``: tokens of theirs would be too old."""
        self.begun_by = {version: begun for version, begun in self.begun_by.items() if begun >= collection}

    def staleness(self, trajectory: Trajectory, collection: int) -> int:
        """Of its oldest token where ``collection`` trains it, in collections.

        Raises:
            RolloutError: a token is of weights that were never loaded, or are forgotten.
        """
        sampled = (turn.completion for turn in trajectory.turns if turn.author != "expert")
        versions = {version for completion in sampled for version in completion.policy_version}
        unknown = versions.difference(self.begun_by)
        if unknown:
            raise RolloutError(
                f"task {trajectory.task.id!r}: tokens are of weights {sorted(unknown)}, and the engine has been given "
                f"{sorted(self.begun_by)}: it does not take new weights, or says so wrongly"
            )
        return collection - min((self.begun_by[version] for version in versions), default=collection)
