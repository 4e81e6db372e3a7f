from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from sorl_lightning.functional import depth
from sorl_lightning.types import TurnStatistics


def probe(divergence=(), trajectories=None, tokens=None, success=(), everyone=()):
    """Statistics with ``divergence`` per token at each turn."""
    turns = max(len(divergence), len(success), len(everyone))

    def row(values, fill=0.0):
        return torch.tensor([*map(float, values), *[fill] * (turns - len(values))], dtype=torch.float64)

    tokens = row(tokens or (), 1.0)
    return TurnStatistics(
        trajectories=row(trajectories or (), 1.0),
        tokens=tokens,
        divergence_sum=row(divergence) * tokens,
        success_last_turns=row(success),
        all_last_turns=row(everyone),
    )


def at_turn(turn):
    return [0.0] * turn + [1.0]


def test_probes_are_the_first_three_and_every_eighth():
    probes = [k for k in range(1, 101) if depth.is_probe(k)]
    assert probes == [1, 2, 3, *range(8, 97, 8)]
    assert len(probes) == 15


def test_replay():
    state, smoothed, caps = depth.DepthState(50.0), {}, {1: 50}
    for k in range(1, 101):
        if depth.is_probe(k):
            state = depth.observe(state, probe(at_turn(8 if k <= 24 else 20)))
            smoothed[k] = state.smoothed
        caps[k + 1] = depth.cap(state, maximum=50)
    assert [smoothed[k] for k in (1, 2, 3)] == pytest.approx([37.4, 28.58, 22.406])
    expected = {4: 23, 9: 19, 17: 16, 25: 14, 33: 16, 41: 18, 65: 20, 89: 21}
    assert {k: caps[k] for k in expected} == expected


@pytest.mark.parametrize(
    ("statistics", "expected"),
    [
        (probe([1, 1, 1, 1]), 2),  # 1.5 rounds up
        (probe([1, 1, 1]), 1),
        (probe([3, 0, 1]), 1),  # .5
        (probe([-5, 1, 1, 1]), 2),  # a negative divergence counts as 0
        (probe([2, 2, 2], trajectories=[4, 2, 1]), 1),  # (2 + 2) / 7
        (probe([1, 1], tokens=[100, 1]), 1),  # mean per token, not sum
        (probe([0, 0, 0]), 0),
        (probe([0, 0, 1e-12]), 0),  # the guard
    ],
)
def test_effective_depth_weighs_turns_by_divergence_and_reach(statistics, expected):
    assert depth.effective_depth(statistics) == expected


@pytest.mark.parametrize(
    ("success", "coverage"),
    [
        ([0, 8, 0, 2], 1),  # 8 of 10 is 80 %
        ([0, 7, 0, 3], 3),
        ([10], 0),
        ([0, 0, 4, 4, 2], 3),
    ],
)
def test_coverage_is_the_least_turn_by_which_four_fifths_succeed(success, coverage):
    assert depth.observe(depth.DepthState(10.0), probe([1], success=success)).coverage == coverage


def test_rounding_does_not_raise_the_coverage():
    state = depth.observe(depth.DepthState(10.0), probe([1], success=[0, 7, 3]), quantile=0.7)
    assert state.coverage == 1


def test_coverage_is_kept_without_enough_successes():
    state = depth.observe(depth.DepthState(10.0), probe([1], success=[0, 0, 0, 0, 9]))
    assert (state.coverage, state.smoothed) == (4, pytest.approx(0.7 * 10 + 0.3 * 4))
    state = depth.observe(state, probe([1], success=[7]))
    assert (state.coverage, state.misses) == (4, 1)
    assert depth.observe(depth.DepthState(10.0), probe([1], success=[7])).coverage == 0


def test_the_larger_of_both_depths_counts():
    state = depth.observe(depth.DepthState(0.0), probe(at_turn(6), success=[0, 9]), smoothing=1.0)
    assert (state.effective, state.coverage, state.smoothed) == (6, 1, 6)
    state = depth.observe(depth.DepthState(0.0), probe([1], success=[0, 0, 9]), smoothing=1.0, slack=1)
    assert state.smoothed == 3


def test_coverage_of_all_trajectories():
    statistics = probe([1], success=[9], everyone=[9, 0, 0, 9])
    assert depth.observe(depth.DepthState(10.0), statistics, coverage_of="all").coverage == 3


def test_fallback_to_all_after_three_probes_without_enough_successes():
    statistics = probe([1], success=[1], everyone=[3, 3, 2, 8])
    state, seen = depth.DepthState(10.0), []
    for _ in range(3):
        state = depth.observe(state, statistics, fallback_after=3)
        seen.append(state.coverage)
    assert seen == [0, 0, 2]
    state = depth.observe(state, probe([1], success=[9]), fallback_after=3)
    assert (state.coverage, state.misses) == (0, 0)


def test_a_probe_without_tokens_changes_nothing():
    state = depth.DepthState(10.0, coverage=3)
    empty = torch.zeros(0, dtype=torch.float64)
    fields = [field.name for field in dataclasses.fields(TurnStatistics)]
    assert depth.observe(state, TurnStatistics(**dict.fromkeys(fields, empty))) == state
    assert depth.observe(state, TurnStatistics(**dict.fromkeys(fields, torch.zeros(4)))) == state


@pytest.mark.parametrize(
    ("smoothed", "expected"), [(0.0, 2), (0.9, 2), (1.5, 3), (7.49, 8), (7.5, 9), (49.0, 50), (50.0, 50)]
)
def test_cap_stays_between_its_limits(smoothed, expected):
    assert depth.cap(depth.DepthState(smoothed), maximum=50) == expected


def test_the_environments_limit_wins():
    assert depth.cap(depth.DepthState(9.0), minimum=2, maximum=1) == 1


def test_state_survives_json():
    state = depth.observe(depth.DepthState(50.0), probe(at_turn(8), success=[9]))
    assert depth.DepthState(**json.loads(json.dumps(dataclasses.asdict(state)))) == state


def test_what_cannot_be_observed_is_refused():
    with pytest.raises(ValueError, match="divergence_sum must be finite"):
        depth.observe(depth.DepthState(1.0), probe([float("nan")]))
    with pytest.raises(ValueError, match="iteration must be at least 1, got 0"):
        depth.is_probe(0)
    with pytest.raises(ValueError, match=r"smoothing must be in \[0, 1\], got 2"):
        depth.observe(depth.DepthState(1.0), probe([1]), smoothing=2)
