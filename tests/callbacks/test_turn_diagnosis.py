"""Numbers by turn are those of the batch; heat maps put collections from left to right."""

from __future__ import annotations

import json

import pytest
import torch

from distilling import rollouts, student, watched
from sorl_lightning.callbacks import TurnDiagnosis
from sorl_lightning.callbacks.turn_diagnosis import SCALE, by_turn, heat_map
from sorl_lightning.types import TurnProfile, TurnStatistics


def test_numbers_by_turn_by_hand() -> None:
    def row(*values):
        return torch.tensor(values, dtype=torch.float64)

    profile = TurnProfile(
        tokens=row(4, 2), failed_tokens=row(1, 2), divergence=row(2, 1), failed_divergence=row(1.1, 1),
        student_entropy=row(8, 1), teacher_entropy=row(2, 3), loss=row(0.3, 0.1),
    )  # fmt: skip
    none = row(0, 0)
    statistics = TurnStatistics(
        trajectories=row(2, 1), tokens=row(4, 2), divergence_sum=row(2, 1), success_last_turns=none, all_last_turns=none
    )
    figures = by_turn(statistics, profile)
    assert figures["divergence"] == [0.5, 0.5]
    assert figures["student_entropy"] == [2.0, 0.5]
    assert figures["teacher_entropy"] == [0.5, 1.5]
    assert figures["loss_share"] == pytest.approx([0.75, 0.25])
    assert figures["survivors"] == [2, 1]
    assert figures["failed_less_succeeded"] == pytest.approx([1.1 - 0.3, 0.0])  # nobody succeeded at turn 1


def test_each_collection_is_a_line_that_agrees_with_the_run(fit, tmp_path) -> None:
    watch = watched(fit, student(), rollouts(micro_batches=5), TurnDiagnosis(folder=str(tmp_path)), max_epochs=2)
    lines = [json.loads(line) for line in (tmp_path / "turn_diagnosis.jsonl").read_text().splitlines()]
    assert [line["collection"] for line in lines] == [0, 1]
    for line, figures in zip(lines, watch.figures, strict=True):
        assert sum(line["loss_share"]) == pytest.approx(1.0)
        mean = sum(k * n for k, n in zip(line["divergence"], line["tokens"], strict=True)) / sum(line["tokens"])
        assert mean == pytest.approx(figures["train/divergence"], rel=1e-5)


def test_a_heat_map_is_dark_to_light_and_black_where_nothing_is() -> None:
    image = heat_map([[1.0, 3.0], [2.0]])
    assert image.shape == (2 * SCALE, 2 * SCALE)
    assert image[::SCALE, ::SCALE].tolist() == [[0.0, 0.5], [1.0, 0.0]]


def test_its_history_survives_a_round_trip() -> None:
    first, second = TurnDiagnosis(), TurnDiagnosis()
    first.history.append({"divergence": [1.0]})
    second.load_state_dict(first.state_dict())
    assert second.history == first.history
