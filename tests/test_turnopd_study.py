"""The page of the TurnOPD study says what its files say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from studies.turnopd import page


def record(arm: str, seed: int, successes: list[float], seconds: float) -> dict:
    """A run whose evaluations come every ``seconds`` of training, a quarter of them the teacher's."""
    evaluations = [
        {"collection": number, "success": success, "cpu_rollout": 0.5 * seconds * number, "cpu_probe": 0.0,
         "cpu_teacher": 0.25 * seconds * number, "cpu_update": 0.25 * seconds * number, "cpu_validation": 100.0}
        for number, success in enumerate(successes, 1)
    ]  # fmt: skip
    cpu = {phase: evaluations[-1][f"cpu_{phase}"] for phase in page.PHASES}
    history = [{"turn_limit": 8, "loss_share": [0.4, 0.2, 0.1, 0.1, 0.1, 0.1]}] * len(successes)
    return {"arm": arm, "seed": seed, "collections": len(successes), "evaluations": evaluations, "cpu": cpu,
            "wall": cpu, "history": history, "tasks": 48, "start": 0.5}  # fmt: skip


VANILLA = record("vanilla", 0, [0.2, 0.4, 0.6, 0.8, 0.8, 0.8], 10.0)
BOTH = record("both", 0, [0.6, 0.8, 0.8, 0.8, 0.8, 0.8], 5.0)


def test_accuracy_is_the_mean_of_the_last_four_evaluations_within_a_time() -> None:
    assert page.accuracy(VANILLA) == pytest.approx(0.75)
    assert page.accuracy(VANILLA, until=45.0) == pytest.approx(0.5)
    assert page.accuracy(VANILLA, until=25.0) == pytest.approx(0.3)
    assert page.accuracy(VANILLA, until=5.0) == 0.0


def test_time_counts_training_and_no_validation() -> None:
    assert page.training_seconds(VANILLA) == pytest.approx(60.0)
    assert page.time_to(VANILLA, 0.7499) == pytest.approx(60.0)
    assert page.time_to(BOTH, 0.7499) == pytest.approx(20.0)
    assert page.time_to(VANILLA, 0.9) is None


def test_shares_of_early_and_deep_turns() -> None:
    assert page.shares(VANILLA) == pytest.approx((0.7, 0.2))


def test_the_page_compares_arms_seed_by_seed(tmp_path: Path) -> None:
    for run in (VANILLA, BOTH):
        (tmp_path / f"{run['arm']}-0.json").write_text(json.dumps(run))
    success = {"teacher": {"0": 0.95, "3": 0.9}, "student": {"0": 0.5, "3": 0.5}}
    (tmp_path / "models.json").write_text(json.dumps({"tasks": 96, "success": success}))
    page.write(tmp_path, tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert "| both | 1 | 80.0 | 80.0 | 30.0 | 0.33 | 0.33 |" in text
    # Of the three evaluations that had been made when the other arm ended.
    assert "| vanilla | 1 | 40.0 | 75.0 | 60.0 | 1.00 | 1.00 |" in text
    assert "| teacher | 95.0 | 90.0 |" in text
    assert "2 runs" in text
