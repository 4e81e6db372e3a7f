"""``sorl rollout``: what is printed and kept is what was played."""

from __future__ import annotations

import json

import pytest

from conftest import TINY
from sorl_lightning.cli import main

WORLD = ["--environment", "doubles.Countdown", "--max_tokens", "4", "--tasks", "2", "--n", "2"]


@pytest.fixture
def folder(tmp_path):
    model, tokenizer = TINY.load()
    model.save_pretrained(tmp_path / "policy")
    tokenizer.save_pretrained(tmp_path / "policy")
    return str(tmp_path / "policy")


def test_a_model_plays_and_its_trajectories_are_kept(folder, tmp_path, capsys) -> None:
    output = tmp_path / "played"
    main(["rollout", folder, *WORLD, "--output", str(output)])
    printed = capsys.readouterr().out
    lines = [json.loads(line) for line in (output / "0000.jsonl").read_text().splitlines()]
    assert [(line["task"], line["sibling"]) for line in lines] == [
        ("validation-0", 0), ("validation-0", 1), ("validation-1", 0), ("validation-1", 1)
    ]  # fmt: skip
    assert all(len(line["turns"]) == 2 and line["turns"][0]["observation"] == "1 left" for line in lines)
    tokens = lines[0]["turns"][0]["tokens"]
    assert "".join(tokens["piece"]) == lines[0]["turns"][0]["text"] or tokens["id"]
    assert all(logprob < 0 for logprob in tokens["logprob"])
    won = sum(line["success"] for line in lines)
    assert f"{won} of 4 episodes succeeded, 2.0 turns each" in printed
    again = tmp_path / "again"
    main(["rollout", folder, *WORLD, "--output", str(again)])
    ids = lambda path: [t["tokens"]["id"] for x in path.read_text().splitlines() for t in json.loads(x)["turns"]]  # noqa: E731
    assert ids(again / "0000.jsonl") == ids(output / "0000.jsonl")
    with pytest.raises(SystemExit, match="is there already"):
        main(["rollout", folder, *WORLD, "--output", str(output)])


def test_settings_out_of_range_are_one_sentence(folder) -> None:
    with pytest.raises(SystemExit, match="must be at least 1 and temperature 0 or more, got 0, 1, 16, 256"):
        main(["rollout", folder, "--environment", "doubles.Countdown", "--tasks", "0"])
    with pytest.raises(SystemExit, match="sorl envs lists them"):
        main(["rollout", folder])
    with pytest.raises(SystemExit, match=r"^sorl: .*turns_max"):
        main(["rollout", folder, "--turns_max", "3"])


@pytest.mark.parametrize(
    ("limit", "sentence"),
    [("0", "context_limit must be at least 1, got 0"), ("4096", r"context_limit=4096 is more than the model's \d+")],
)
def test_a_context_that_the_model_does_not_have_is_refused(folder, limit: str, sentence: str) -> None:
    with pytest.raises(SystemExit, match=f"^sorl: {sentence}"):
        main(["rollout", folder, *WORLD, "--context_limit", limit])
