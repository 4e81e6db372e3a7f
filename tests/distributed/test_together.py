"""What ranks decide together: skipped steps, failures, weights that travel, checkpoints."""

from __future__ import annotations

import numpy as np
import pytest
import scenarios
from processes import launch

pytestmark = pytest.mark.distributed


def test_nan_on_one_rank_skips_the_step_on_all() -> None:
    shares = launch(scenarios.run, 2, "fsdp2", 2, {"passes": 4, "objective": scenarios.Poison()})
    for share in shares:
        first, second, third, _ = share["parameters"]
        assert np.array_equal(first, second)
        assert np.isfinite(third).all()
        assert not np.array_equal(second, third)
        assert share["version"] == 3
        assert share["figures"][-1]["train/skipped_steps"] == 1
    assert np.array_equal(shares[0]["parameters"][-1], shares[1]["parameters"][-1])


def test_weights_of_an_engine_are_gathered_one_at_a_time() -> None:
    for counts in launch(scenarios.weights_alive, 2):
        assert counts["tensors"] > 10
        assert counts["most"] == 1


def test_a_rank_whose_groups_all_failed_goes_on_with_padding() -> None:
    shares = launch(scenarios.all_fail_on_one_rank, 2, False)
    assert [len(share["tasks"]) for share in shares] == [8, 0]
    assert shares[0]["version"] == shares[1]["version"] == 2
    assert np.array_equal(shares[0]["parameters"][-1], shares[1]["parameters"][-1])
    assert shares[1]["figures"][0]["rollout/failed_groups"] == 2


def test_when_all_groups_of_all_ranks_failed_all_stop() -> None:
    with pytest.raises(AssertionError, match="all 4 groups of collection 0 failed"):
        launch(scenarios.all_fail_on_one_rank, 2, True)


def test_the_trajectory_log_of_two_ranks_is_that_of_one(tmp_path) -> None:
    (alone,) = launch(scenarios.logged, 1, 1, str(tmp_path / "alone"))
    for together in launch(scenarios.logged, 2, 2, str(tmp_path / "together")):
        assert len(together) == len(alone) == 2 * 6
        for ours, theirs in zip(together, alone, strict=True):
            for turn, other in zip(ours.pop("turns"), theirs["turns"], strict=True):
                tokens, others = turn.pop("tokens"), other["tokens"]
                assert turn == {name: value for name, value in other.items() if name != "tokens"}
                assert set(tokens) == set(others)
                for name, values in tokens.items():
                    assert values == others[name] if name == "piece" else np.allclose(values, others[name], atol=1e-5)
            assert ours == {name: value for name, value in theirs.items() if name != "turns"}


def test_a_checkpoint_is_policy_and_optimiser(tmp_path) -> None:
    for sizes in launch(scenarios.checkpoint_sizes, 2, str(tmp_path)):
        assert sizes["parameters"] > 10_000_000
        assert sizes["bytes"] == pytest.approx(3 * 4 * sizes["parameters"], rel=0.02)
