"""What flows through a run: a task becomes turns, turns a trajectory, trajectories a batch of rows.

A worked example. Task "find the coin" is rolled out with two siblings. Sibling 0 plays two turns:

    turn 0   prompt_ids [1, 7, 8]                completion [20, 2]   observation "You see a door."
    turn 1   prompt_ids [1, 7, 8, 20, 2, 9, 9]   completion [21, 2]   observation None, the episode is done

Turn 1's prompt extends turn 0's prompt and completion, so both share one row of the batch, whose ``turn`` is
``[-1, -1, -1, 0, 0, -1, -1, 1, 1]``: the loss mask is ``turn >= 0`` and no token was ever re-tokenised.
"""

from sorl_lightning.types.batches import Comparison, RolloutBatch, TeacherScores
from sorl_lightning.types.by_turn import TokenSignals, TurnProfile, TurnStatistics
from sorl_lightning.types.losses import LossTerms
from sorl_lightning.types.trajectories import (
    Author,
    Completion,
    Ending,
    FinishReason,
    Message,
    Task,
    Trajectory,
    Turn,
)

__all__ = [
    "Author",
    "Message",
    "Task",
    "FinishReason",
    "Completion",
    "Turn",
    "Ending",
    "Trajectory",
    "TeacherScores",
    "Comparison",
    "RolloutBatch",
    "TurnStatistics",
    "TurnProfile",
    "TokenSignals",
    "LossTerms",
]
