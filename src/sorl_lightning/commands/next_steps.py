"""What to do about words that the parser refused."""

from __future__ import annotations

import contextlib
import difflib
import io
import re
from collections.abc import Callable, Sequence

from sorl_lightning.commands.pages import SUBCOMMANDS, TOPICS
from sorl_lightning.errors import ConfigurationError

OWN_CLASS = "a class of your own is MODULE.CLASS, with MODULE.py in this folder or on PYTHONPATH"


def check_command(word: str, commands: Sequence[str]) -> None:
    """Refuse a first word that is no command.

    Raises:
        ConfigurationError: it is none; the one that it is like is named.
    """
    known = [*SUBCOMMANDS, *commands]
    if word not in known and not word.startswith("-"):
        raise ConfigurationError(f"there is no command {word!r}{meant(word, known)}; sorl --help lists them")


def next_step(message: str, arguments: Sequence[str], run: Callable[[list[str]], object]) -> str:
    """Where to look after the parser's ``message`` about ``arguments``, as a clause that follows it.

    Args:
        run: runs a subcommand; asked for the options that there are.
    """
    command = arguments[0] if arguments else ""
    if "import path" in message and command not in SUBCOMMANDS:
        return f"sorl envs lists what ships; {OWN_CLASS}"
    if command not in SUBCOMMANDS:
        return f"sorl {command} --help lists its options" if command.isidentifier() else "sorl --help lists commands"
    if "arguments are required" in message or "expected one argument" in message:
        return f"name a config, as in sorl {command} --config sorl:quickstart; sorl configs lists those that ship"
    if "File does not exist" in message:
        return "sorl configs lists those that ship, for --config sorl:NAME"
    if unknown := re.search(r"unrecognized arguments: --([\w.]+)", message):
        topic = unknown[1].partition(".")[0]
        there = f"{command} --help{f' {topic}' if topic in TOPICS else ''}"
        return f"sorl {there} lists what there is{meant(unknown[1], options(command, run), '--')}"
    if refused := re.search(r"class_path '([\w.]+)': Option '(\w+)' is not accepted", message):
        key = re.search(r'Parser key "([\w.]+)"', message)
        place = key[1] if key else "data.environment"
        return f"sorl {command} --{place}.help {refused[1].rpartition('.')[2]} lists its options"
    if key := re.search(r'Parser key "([\w.]+)".*(?:import path|given class_path)', message):
        listed = (
            "sorl envs lists what ships" if "environment" in key[1] else f"sorl {command} --help all names what ships"
        )
        return f"{listed}; {OWN_CLASS}"
    topic = next((t for t in TOPICS if f'"{t}.' in message), "")
    return f"sorl {command} --help{f' {topic}' if topic else ''} lists what there is"


def shortened(message: str) -> str:
    """The parser's message without the whole of what it was given, where that is an object with all its defaults."""
    return re.sub(r"\.? (Given value type: \S+ \S+ Given value|Got value): Namespace\(.*", "", message)


def meant(word: str, known: Sequence[str], dashes: str = "") -> str:
    """A question after what was probably meant; nothing where nothing is like it."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" (did you mean {dashes}{close[0]}?)" if close else ""


def options(command: str, run: Callable[[list[str]], object]) -> list[str]:
    """Every option of a subcommand, without its dashes."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        run([command, "--help"])
    return re.findall(r"^  --([\w.]+)", text.getvalue(), re.MULTILINE)
