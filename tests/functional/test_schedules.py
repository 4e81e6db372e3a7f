from __future__ import annotations

import math

import pytest

from sorl_lightning.functional import schedules


def test_linear_ramp_over_the_whole_run():
    assert [schedules.linear_ramp(step / 4) for step in range(5)] == [0, 0.25, 0.5, 0.75, 1]


def test_linear_ramp_over_a_window():
    assert [schedules.linear_ramp(x, 0.2, 0.6) for x in (0, 0.2, 0.4, 0.6, 1)] == pytest.approx([0, 0, 0.5, 1, 1])


def test_cosine_ramp_is_flat_at_both_ends():
    values = [schedules.cosine_ramp(x, 0, 0.8) for x in (-1, 0, 0.2, 0.4, 0.6, 0.8, 2)]
    quarter = (1 - math.sqrt(0.5)) / 2
    assert values == pytest.approx([0, 0, quarter, 0.5, 1 - quarter, 1, 1])


@pytest.mark.parametrize("ramp", [schedules.linear_ramp, schedules.cosine_ramp])
def test_a_window_needs_a_length(ramp):
    with pytest.raises(ValueError, match=r"start must be below end, got start 0\.5 and end 0\.5"):
        ramp(0.1, 0.5, 0.5)
    with pytest.raises(ValueError, match="progress must be a number"):
        ramp(math.nan)


def test_staircase_rises_every_second_iteration_up_to_the_maximum():
    assert [schedules.staircase(k, maximum=4) for k in range(9)] == [1, 1, 2, 2, 3, 3, 4, 4, 4]
    assert [schedules.staircase(k, start=2, rise=3, every=1, maximum=7) for k in range(4)] == [2, 5, 7, 7]


@pytest.mark.parametrize(("share", "turns"), [(0.5, 25), (0.25, 13), (0.1, 5), (0.0, 1), (1.0, 50), (0.14, 7)])
def test_fraction_rounds_up(share, turns):
    assert schedules.fraction(share, 50) == turns


def test_expert_prefix_shrinks_to_nothing():
    assert [schedules.expert_prefix(k, length=4) for k in range(8)] == [3, 3, 2, 2, 1, 1, 0, 0]
    assert schedules.expert_prefix(0, length=0) == 0
