"""Hypothesis strategies for trajectories and batches, for tests of losses, weights and callbacks. Needs hypothesis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sorl_lightning.rollout.packing import pack
from sorl_lightning.types import Completion, Ending, RolloutBatch, Task, Trajectory, Turn

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

FINITE: dict[str, Any] = {"allow_nan": False, "width": 32}


def trajectories(
    max_groups: int = 3, max_siblings: int = 3, max_turns: int = 4, max_tokens: int = 4, vocabulary: int = 100
) -> SearchStrategy[tuple[Trajectory, ...]]:
    """Collections of whole groups, ordered by group and sibling.

    Turns may be empty, prompts may not extend what came before (a new row then starts), and endings are any but ERROR.

    Args:
        max_groups: most groups; at least one.
        max_siblings: most trajectories of a group; all groups have as many.
        max_turns: most turns of a trajectory; at least one.
        max_tokens: most tokens of a completion and of an observation.
        vocabulary: token ids are below it.
    """
    from hypothesis import strategies as st

    ids = st.lists(st.integers(0, vocabulary - 1), max_size=max_tokens)
    opening = st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=max_tokens)

    @st.composite
    def one(draw: Any, group: int, sibling: int) -> Trajectory:
        prompt, turns = tuple(draw(opening)), []
        for index in range(draw(st.integers(1, max_turns))):
            generated = tuple(draw(ids))
            turns.append(_turn(draw, index, prompt, generated))
            rewritten = draw(st.booleans()) and draw(st.booleans())  # a chat template that drops what was thought
            prompt = tuple(draw(opening)) if rewritten else (*prompt, *generated, *draw(ids))
        return Trajectory(
            task=Task(id=f"task-{group}"),
            group=group,
            sibling=sibling,
            turns=tuple(turns),
            reward=sum(turn.reward for turn in turns),
            success=draw(st.booleans()),
            ending=draw(st.sampled_from([ending for ending in Ending if ending is not Ending.ERROR])),
            turn_limit=max_turns,
            seed=0,
        )

    @st.composite
    def collection(draw: Any) -> tuple[Trajectory, ...]:
        groups, siblings = draw(st.integers(1, max_groups)), draw(st.integers(1, max_siblings))
        return tuple(draw(one(group, sibling)) for group in range(groups) for sibling in range(siblings))

    return collection()


def _turn(draw: Any, index: int, prompt: tuple[int, ...], generated: tuple[int, ...]) -> Turn:
    """A turn that generated these tokens, with whatever else belongs to it."""
    from hypothesis import strategies as st

    logprobs = draw(st.lists(st.floats(-20, 0), min_size=len(generated), max_size=len(generated)))
    completion = Completion(
        token_ids=generated,
        logprobs=tuple(logprobs),
        finish_reason=draw(st.sampled_from(("stop", "length"))),
        policy_version=(draw(st.integers(0, 9)),) * len(generated),
    )
    return Turn(
        index=index,
        prompt_ids=prompt,
        completion=completion,
        text=" ".join(map(str, generated)),
        observation="seen",
        reward=draw(st.floats(-9, 9, **FINITE)),
        seconds=0.0,
    )


def batches(**limits: int) -> SearchStrategy[RolloutBatch]:
    """Rows of such collections, with advantages; weights are still to be set.

    Args:
        limits: of ``trajectories``.
    """
    from hypothesis import strategies as st

    @st.composite
    def batch(draw: Any) -> RolloutBatch:
        collection = draw(trajectories(**limits))
        values = draw(st.lists(st.floats(-3, 3, **FINITE), min_size=len(collection), max_size=len(collection)))
        rows = pack(collection)
        return rows.replace(advantages=torch.where(rows.generated, torch.tensor(values)[rows.trajectory], 0.0))

    return batch()
