"""Identities of packing, cutting and weighing on whatever collections there may be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sorl_lightning.rollout.micro_batches import balance
from sorl_lightning.rollout.packing import finite_rows, lengths, pack
from sorl_lightning.streams import UpdatePlan
from sorl_lightning.testing import batches, trajectories

# The run-time checker of shapes draws from the global generator, in strategies too.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the .random. module inside strategies")
quick = settings(max_examples=25, deadline=None)


@quick
@given(trajectories())
def test_each_generated_token_is_trained_once(collection) -> None:
    rows = pack(collection)
    assert int(rows.generated.sum()) == sum(trajectory.generated_tokens for trajectory in collection)
    for index, trajectory in enumerate(collection):
        mine = rows.generated & (rows.trajectory == index)
        said = [token for turn in trajectory.turns for token in turn.completion.token_ids]
        assert rows.input_ids[mine].tolist() == said
        torch.testing.assert_close(
            rows.behaviour_logprobs[mine],
            torch.tensor([value for turn in trajectory.turns for value in turn.completion.logprobs]),
            rtol=1e-6, atol=1e-6,
        )  # fmt: skip


@quick
@given(
    batches(), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.sampled_from(["trajectory", "token", "turn"])
)
def test_each_pass_trains_each_token_once_and_each_update_weighs_one(
    rows, micro_batches, mini_batches, passes, aggregation
) -> None:
    plan = UpdatePlan(
        mini_batches=mini_batches, passes=passes, micro_batches=micro_batches, token_budget=None,
        aggregation=aggregation, max_turns=4, max_tokens=4, seed=0,
    )  # fmt: skip
    parts = list(plan.micro_batches_of(rows, 0))
    assert len(parts) == len(plan)
    assert sum(int(part.generated.sum()) for part in parts) == passes * int(rows.generated.sum())
    for start in range(0, len(parts), micro_batches):
        update = parts[start : start + micro_batches]
        tokens = sum(int(part.generated.sum()) for part in update)
        for name in ("trajectory_weights", "turn_weights"):
            total = sum(float(getattr(part, name).sum()) for part in update)
            assert abs(total - (tokens > 0)) < 1e-5, name
            assert all((getattr(part, name)[~part.generated] == 0).all() for part in update)


@quick
@given(st.lists(st.integers(0, 30), max_size=20), st.integers(1, 6))
def test_rows_are_dealt_out_once_whatever_their_lengths(row_lengths, micro_batches) -> None:
    parts = balance(torch.tensor(row_lengths, dtype=torch.long), micro_batches)
    assert len(parts) == micro_batches
    assert sorted(torch.cat(parts).tolist()) == list(range(len(row_lengths)))


@quick
@given(batches(), st.data())
def test_a_bad_number_takes_its_trajectory_along_and_nothing_else(rows, data) -> None:
    if not rows.generated.any():
        return
    places = rows.generated.nonzero()
    row, column = places[data.draw(st.integers(0, len(places) - 1))].tolist()
    advantages = rows.advantages.clone()
    advantages[row, column] = data.draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
    victim = int(rows.trajectory[row, 0])
    kept, dropped = finite_rows(rows.replace(advantages=advantages))
    assert dropped == 1
    assert victim not in kept.trajectory[kept.generated]
    others = rows.generated & (rows.trajectory != victim)
    assert int(kept.generated.sum()) == int(others.sum())
    assert lengths(kept).max() <= kept.turn.shape[1]
