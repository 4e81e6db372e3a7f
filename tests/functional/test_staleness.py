"""Admission and choice: values, and no group late whatever finishes when."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sorl_lightning.functional.staleness import admissible, chosen, may_push, on_time


@pytest.mark.parametrize(
    ("dues", "collection", "staleness", "expected"),
    [
        ([], 0, 0, 4),  # strictly on-policy: one collection at a time
        ([], 0, 1, 8),
        ([], 5, 3, 16),
        ([7] * 4, 7, 1, 4),
        ([7] * 4 + [8] * 4, 7, 1, 0),
        ([7] * 2 + [9] * 6, 7, 2, 4),
        ([9] * 6, 7, 1, 6),  # a later deadline than one's own, as after max_staleness was lowered
        ([9] * 12, 7, 1, 0),
    ],
)
def test_admissible(dues, collection, staleness, expected) -> None:
    assert admissible(dues, 4, collection, staleness) == expected


def test_who_is_due_is_waited_for_and_others_are_not() -> None:
    assert chosen([3, 3, 4, 4], [False, True, True, True], 2, 3) is None
    assert chosen([3, 3, 4, 4], [True, True, True, True], 2, 3) == [0, 1]
    assert chosen([4, 4, 4, 4], [False, True, False, True], 2, 3) == [1, 3]
    # Three are due by 4 and two of them can wait for collection 4: one must be taken now, one may be from later.
    assert chosen([4, 4, 4, 5, 5], [False, False, True, True, True], 2, 3) == [2, 3]
    assert chosen([4, 4, 4, 5, 5], [False, False, False, True, True], 2, 3) is None
    with pytest.raises(ValueError, match="cannot all be trained"):
        chosen([3, 3, 3], [True] * 3, 2, 3)


def test_weights_wait_for_a_group_that_is_due() -> None:
    assert may_push([], 3)
    assert may_push([3, 5], 3)
    assert not may_push([3, 5], 4)


@given(st.lists(st.integers(0, 4), max_size=7), st.integers(1, 3), st.integers(0, 3))
def test_admissible_is_the_largest_number_that_is_on_time(dues, quota, staleness) -> None:
    number = admissible(dues, quota, 0, staleness)
    if on_time(dues, quota, 0):
        assert on_time([*dues, *[staleness] * number], quota, 0)
    assert not on_time([*dues, *[staleness] * (number + 1)], quota, 0)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=7), st.integers(1, 3))
def test_chosen_is_the_first_choice_that_leaves_the_rest_on_time(groups, quota) -> None:
    dues, finished = [due for due, _ in groups], [there for _, there in groups]
    if not on_time(dues, quota, 0):
        return
    ready = [index for index, there in enumerate(finished) if there]
    possible = (
        list(choice)
        for choice in itertools.combinations(ready, quota)  # in lexicographic order
        if on_time([due for index, due in enumerate(dues) if index not in choice], quota, 1)
    )
    assert chosen(dues, finished, quota, 0) == next(possible, None)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3), st.integers(1, 4), st.integers(0, 2**16))
def test_no_group_is_late_and_each_is_trained_once(staleness, quota, seed) -> None:
    generator, epochs = random.Random(seed), 12
    outstanding: dict[int, tuple[int, bool]] = {}  # due, finished; in order of admission
    drawn, trained, realised = 0, [], []
    for collection in range(epochs):
        assert may_push([due for due, finished in outstanding.values() if not finished], collection)
        room = admissible([due for due, _ in outstanding.values()], quota, collection, staleness)
        for _ in range(min(room, quota * (epochs - collection) - len(outstanding))):
            outstanding[drawn] = (collection + staleness, False)
            drawn += 1
        while True:
            dues, finished = zip(*outstanding.values(), strict=True)
            choice = chosen(dues, finished, quota, collection)
            if choice is not None:
                break
            lucky = generator.choice([n for n, (_, there) in outstanding.items() if not there])
            outstanding[lucky] = (outstanding[lucky][0], True)
        numbers = list(outstanding)
        for index in choice:
            due, _ = outstanding.pop(numbers[index])
            realised.append(collection - (due - staleness))
            trained.append(numbers[index])
    assert sorted(trained) == list(range(drawn)) == list(range(quota * epochs))
    assert all(0 <= age <= staleness for age in realised)
