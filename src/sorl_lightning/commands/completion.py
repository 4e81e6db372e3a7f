"""``sorl completion SHELL``: the script that completes commands and options with the tab key."""

from __future__ import annotations

import importlib
import importlib.util
import re
from typing import Any, Literal

from jsonargparse import ArgumentParser
from jsonargparse._typehints import ActionTypeHint
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from sorl_lightning import cli
from sorl_lightning.agent_cli import AgentCLI
from sorl_lightning.errors import ConfigurationError

# Options whose classes, and their options in turn, are completed too.
PARTS = ("data.environment", "model.policy", "model.objective")
CALLABLE = re.compile(r"Callable|Iterable")  # of an optimizer, a schedule


def completion(shell: Literal["bash", "zsh"]) -> None:
    """Print a script that completes sorl's commands and options, to be read by the shell.

    bash: sorl completion bash > ~/.local/share/bash-completion/completions/sorl

    Args:
        shell: the one that reads it.
    """
    if importlib.util.find_spec("shtab") is None:
        raise ConfigurationError("completion needs the extra: pip install 'sorl-lightning[completion]'")
    cli.run([shell], Completion)


class Completion(AgentCLI):
    """Prints the script where others parse: the parser is whole then, and no run is needed."""

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        (shell,) = args
        action: Any = parser._subcommands_action
        for name in cli.COMMANDS:
            module = importlib.import_module(f"sorl_lightning.commands.{name}")
            add(action, name, getattr(module, name))
        for subcommand in action._name_parser_map.values():
            prune(subcommand)
        print(parser.get_completion_script(f"shtab-{shell}"))
        raise SystemExit(0)


def prune(parser: Any) -> None:
    """Offer the options of classes only of a run's parts: those of all callbacks and loggers take 200 MB."""
    for option in parser._actions:
        hint = getattr(option, "_typehint", None)
        if hint is None or option.dest in PARTS:
            continue
        if CALLABLE.search(str(hint)) or ActionTypeHint.is_subclass_typehint(hint, all_subtypes=False, also_lists=True):
            option.complete = {}


def add(subcommands: Any, name: str, command: Any) -> None:
    """Add a command to those of a parser: a function, or functions by name. Outer ones must be there before inner."""
    parser = ArgumentParser()
    subcommands.add_subcommand(name, parser)
    if callable(command):
        parser.add_function_arguments(command, as_positional=True)
        return
    inner = parser.add_subcommands(required=True)
    for one, function in command.items():
        add(inner, one, function)
