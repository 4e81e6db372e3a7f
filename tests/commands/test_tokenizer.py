"""The tokenizer that ships is the one that its command makes."""

from __future__ import annotations

import json
from pathlib import Path

import sorl_lightning
from sorl_lightning.cli import main

SHIPPED = Path(sorl_lightning.__file__).parent / "assets/textworld"


def test_the_command_makes_the_shipped_tokenizer(tmp_path: Path) -> None:
    main(["tokenizer", str(tmp_path)])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / name).read_text()) == json.loads((SHIPPED / name).read_text()), name
    assert (tmp_path / "chat_template.jinja").read_text() == (SHIPPED / "chat_template.jinja").read_text()


def test_any_text_survives(tokenizer) -> None:
    for text in ("take coin", "\n\nYou see 12 café tables — naïve ☕", "  two  spaces", "T-shirt"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
