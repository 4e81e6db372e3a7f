"""Every page of help fits a screen and says where to go on."""

from __future__ import annotations

import re

import pytest

from sorl_lightning.cli import COMMANDS, main
from sorl_lightning.commands.pages import SUBCOMMANDS, TOPICS

SCREEN = (40, 120)


def page(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(list(arguments))
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= SCREEN[0]
    assert max(map(len, text.splitlines())) <= SCREEN[1]
    return text


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_the_front_page_has_every_command(arguments, capsys) -> None:
    named = re.findall(r"^  (\w+) {2,}\S", page(capsys, *arguments), re.MULTILINE)
    assert named == [*SUBCOMMANDS, *COMMANDS]


def test_a_subcommand_has_a_page_and_its_topics_have_their_options(capsys) -> None:
    text = page(capsys, "fit", "--help")
    assert all(f"  {topic} " in text for topic in TOPICS)
    main(["fit", "--help", "data"])
    options = re.findall(r"^  --(\S+)", capsys.readouterr().out, re.MULTILINE)
    assert "data.max_turns" in options
    assert all(option.startswith("data") for option in options)
    main(["fit", "--help", "hf_export"])
    assert "--hf_export.merge" in capsys.readouterr().out
    main(["fit", "--help", "all"])
    assert "--model.objective" in capsys.readouterr().out


@pytest.mark.parametrize("topic", sorted(TOPICS))
def test_every_topic_has_options(topic, capsys) -> None:
    main(["fit", "--help", topic])
    assert f"--{topic}" in capsys.readouterr().out


def test_a_topic_that_is_none_is_one_sentence() -> None:
    with pytest.raises(SystemExit, match="no such topic; there are model, data"):
        main(["fit", "--help", "dta"])
