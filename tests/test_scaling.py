"""The simulator of scale: costs by hand, and runs whose throughput is known in closed form."""

from __future__ import annotations

import dataclasses

import pytest
from benchmarks.costs import Costs
from benchmarks.scaling import Split, changed, simulate, splits_of
from benchmarks.scaling_check import Measured, fit, predict
from benchmarks.workload import Lengths, Load

# 10 parameters of 2 bytes, 10 bytes / s, 50 FLOPs / s: a step is 2 s to read the weights, and 0.4 s a request.
ROUND = Costs(
    parameters=10.0, kv_bytes=0.0, bandwidth=10.0, rate=50.0, memory=1e9, link=1e9, push_bandwidth=20.0,
    push_latency=3.0, wake_latency=5.0, bandwidth_utilisation=1.0,
    decode_utilisation=1.0, training_utilisation=1.0, step_overhead=0.0,
)  # fmt: skip
# One trajectory of 8 tokens a collection, no prompt.
ONE = Load(quota=1, siblings=1, turns=(1, 1), median=8.0, sigma=0.0, prompt=0.0, observation=0.0, step_seconds=0.0)
SEPARATE = Split(generation=1, training=1)


def test_a_decode_step_is_bound_by_memory_then_by_arithmetic() -> None:
    assert ROUND.step(1, 0.0) == 2.0  # 20 bytes / 10
    assert ROUND.step(5, 0.0) == 2.0  # and 5 x 20 FLOPs / 50
    assert ROUND.step(50, 0.0) == 20.0
    cached = dataclasses.replace(ROUND, kv_bytes=4.0, step_overhead=0.5)
    assert cached.step(1, 10.0) == 0.5 + 6.0  # (20 + 40) bytes / 10
    assert cached.step(15, 10.0) == 0.5 + 6.0
    assert cached.step(20, 10.0) == 0.5 + 8.0
    slow = dataclasses.replace(ROUND, bandwidth_utilisation=0.5, decode_utilisation=0.25)
    assert slow.step(1, 0.0) == 4.0
    assert slow.step(20, 0.0) == 32.0


def test_the_default_step_is_that_of_the_data_sheet() -> None:
    """Qwen2.5-1.5B on an H100: 3.0874 GB of weights at 70 % of 3.35 TB/s, and 2 ms beside them."""
    costs = Costs()
    assert costs.step(1, 0.0) == pytest.approx(0.002 + 3.0874e9 / (0.7 * 3.35e12), rel=1e-12)
    assert costs.kv_bytes == 2 * 28 * 2 * 128 * 2
    # With empty caches arithmetic takes over where 2 P n / (rate / 2) passes the reading of the weights.
    assert [costs.step(n, 0.0) > costs.step(1, 0.0) for n in (210, 211)] == [False, True]


def test_training_is_six_flops_a_parameter_and_token_or_its_collectives() -> None:
    assert ROUND.training(100.0, 1) == 120.0  # 6 x 10 x 100 / 50
    assert ROUND.training(100.0, 4) == 30.0
    linked = dataclasses.replace(ROUND, link=2.0, updates=3, training_utilisation=0.5)
    assert linked.training(100.0, 4) == 90.0  # 3 updates x 3 x 20 bytes / 2, longer than 60 s
    assert linked.training(100.0, 1) == 240.0  # one GPU has nobody to talk to


def test_a_push_is_its_latency_and_its_bytes() -> None:
    assert ROUND.push(shared=False) == 4.0  # 3 + 20 / 20
    assert ROUND.push(shared=True) == 9.0  # 5 + 2 x 20 / 10
    assert ROUND.prefill(5.0) == 2.0  # 2 x 10 x 5 / 50


def test_a_policy_fits_or_does_not() -> None:
    small = dataclasses.replace(ROUND, memory=160.0)  # 160 bytes of state, half of a GPU for it
    assert [small.fits(gpus) for gpus in (1, 2)] == [False, True]
    assert splits_of(2, 0, small) == [Split(generation=2, training=2, shared=True)]
    assert splits_of(2, 1, small) == []
    assert splits_of(4, 1, ROUND) == [Split(generation=4 - n, training=n) for n in (1, 2, 3)]


@pytest.mark.parametrize("staleness", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("training", [2.0, 100.0])
def test_with_places_to_spare_a_trajectory_bounds_its_own_collections(staleness: int, training: float) -> None:
    """Steps cost the same however many decode together. A collection starts, is generated and is trained within
    staleness + 1 collections, each of which stops for a push: S + max(T, (G + T) / (s + 1)), which is G + T + S at 0.
    """
    costs = dataclasses.replace(ROUND, training_utilisation=6 * 10 * 8 / 50 / training)
    generation, push = 16.0, 4.0  # 8 steps of 2 s
    row = simulate(costs, ONE, SEPARATE, staleness, 0, 60)  # of 60 collections 1 to 5 are divisors
    expected = push + max(training, (generation + training) / (staleness + 1))
    assert row["seconds_per_collection"] == pytest.approx(expected, rel=1e-6)
    assert row["trained_tokens_per_second"] == pytest.approx(8 / expected, rel=1e-6)
    assert row["training_busy"] == pytest.approx(training / expected, rel=1e-6)
    assert row["push_share"] == pytest.approx(push / expected, rel=1e-6)


@pytest.mark.parametrize("training", [8.0, 40.0])
def test_servers_at_their_limit_bound_all_collections(training: float) -> None:
    """Steps bound by arithmetic: all that overlap does is hide the smaller of both, S + max(G, T)."""
    costs = dataclasses.replace(ROUND, bandwidth=1e12, training_utilisation=6 * 10 * 8 / 50 / training)
    generation, push = 8 * 0.4, 3.0 + 1.0
    costs = dataclasses.replace(costs, rate=5.0, training_utilisation=10 * costs.training_utilisation)
    generation *= 10  # 32 s
    synchronous, streaming = (simulate(costs, ONE, SEPARATE, s, 0, 60)["seconds_per_collection"] for s in (0, 1))
    assert synchronous == pytest.approx(generation + training + push, rel=1e-6)
    assert streaming == pytest.approx(push + max(generation, training), rel=1e-6)


def test_prompts_observations_and_the_environment_take_their_time() -> None:
    load = dataclasses.replace(ONE, turns=(3, 3), prompt=5.0, observation=10.0, step_seconds=7.0)
    assert Lengths(load, 0).tokens(0, 0) == (24.0, 24.0 + 5.0 + 2 * 10.0)
    costs = dataclasses.replace(ROUND, link=1e12)
    row = simulate(costs, load, Split(generation=1, training=1, shared=True), 0, 0, 3)
    turns = 3 * (16.0 + 7.0) + (5.0 + 2 * 10.0) * 0.4
    assert row["seconds_per_collection"] == pytest.approx(9.0 + turns + 6 * 10 * 49 / 50, rel=1e-6)


def test_trajectories_spread_over_servers() -> None:
    """Steps are bound by arithmetic: four at once on one server take four times as long as one on each of four."""
    costs = dataclasses.replace(ROUND, bandwidth=1e12)
    load = dataclasses.replace(ONE, quota=2, siblings=2)
    one, four = (simulate(costs, load, Split(generation=n, training=1), 0, 0, 2) for n in (1, 4))
    training = 6 * 10 * 4 * 8 / 50
    assert one["seconds_per_collection"] == pytest.approx(4.0 + training + 4 * 3.2, rel=1e-6)
    assert four["seconds_per_collection"] == pytest.approx(4.0 + training + 3.2, rel=1e-6)
    assert (one["requests_per_server"], four["requests_per_server"]) == pytest.approx((4.0, 1.0), rel=1e-6)


def test_settings_are_changed_by_name_and_refused_by_it() -> None:
    assert changed(Load(), ["sigma=0", "turns=2,9", "quota=4"]) == Load(sigma=0.0, turns=(2, 9), quota=4)
    with pytest.raises(SystemExit, match=r"'rat=3' must be NAME=NUMBER with a name of Costs: parameters, "):
        changed(Costs(), ["rat=3"])
    with pytest.raises(ValueError, match=r"Costs\.rate must be above 0, got 0"):
        Costs(rate=0.0)


# A collection of 2 groups of 2, two turns of 3 tokens each: two rounds of 0.5 x 3 + 0.1 x 4 seconds, 0.2 x 4 to open.
TIMED = Measured(step=0.5, request=0.1, opening=0.2, token=0.01, loading=1.0)
RECORD = {"turns": [[3, 3]] * 4}


def test_rounds_take_as_long_as_their_longest_turn_and_all_their_requests() -> None:
    rounds, opening, training = 2 * 1.9, 0.8, 24 * 0.01
    seconds = predict(TIMED, [RECORD], 2, 0, 0, 3)
    assert seconds == pytest.approx(1.0 + rounds + opening + training, rel=1e-6)
    slow = dataclasses.replace(TIMED, token=5.0)  # a collection trains for 120 s, and hides the next one's rounds
    assert predict(slow, [RECORD], 2, 1, 0, 4) == pytest.approx(1.0 + 120.0, rel=1e-6)


def test_costs_are_read_off_a_run() -> None:
    def record(*turns: list[int]) -> dict[str, object]:
        rounds = []
        for column in range(max(map(len, turns))):
            tokens = [own[column] for own in turns if column < len(own)]
            seconds = 0.5 * max(tokens) + 0.1 * len(tokens)
            rounds.append({"longest": max(tokens), "requests": len(tokens), "seconds": seconds})
        collecting = sum(r["seconds"] for r in rounds) + 0.2 * len(turns)
        training = 0.01 * sum(map(sum, turns))
        seconds = collecting + training + 1.0
        return {"turns": turns, "rounds": rounds, "collecting": collecting, "loading": 1.0, "seconds": seconds}

    costs = fit([record([3, 5], [2], [4]), record([1, 1, 1], [6, 2, 2])])
    assert dataclasses.astuple(costs) == pytest.approx(dataclasses.astuple(TIMED), rel=1e-9)
