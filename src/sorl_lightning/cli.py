"""The command ``sorl``: training by AgentCLI over AgentModule and RolloutDataModule, and small commands beside it."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import transformers
from jsonargparse import ArgumentError, auto_cli
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from sorl_lightning.agent_cli import AgentCLI, one_sentence
from sorl_lightning.callbacks import Stopped, stoppable
from sorl_lightning.commands.next_steps import check_command, next_step, shortened
from sorl_lightning.commands.pages import asks_for_page, front_page, subcommand_page
from sorl_lightning.datamodule import RolloutDataModule
from sorl_lightning.errors import ConfigurationError, RolloutError, TrainingError
from sorl_lightning.module import AgentModule
from sorl_lightning.shipped import shipped_files

# Advice of libraries that does not apply here, or that their own code gives to itself.
ADVICE = (
    ".*args parameter is intended to run from within Python.*",
    ".*does not have many workers.*",
    ".*callbacks used to create the checkpoint need to be provided.*",
    ".*The dirpath has changed from.*",
    ".*isinstance.treespec, LeafSpec.*",
    ".*tensorboardX. has been removed.*",
)
TRAINER_DEFAULTS = {
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 1,
    "use_distributed_sampler": False,
}


def run(arguments: Sequence[str], command: type[AgentCLI] = AgentCLI) -> AgentCLI:
    """Parse ``arguments`` and run the subcommand that they name."""
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of LightningCLI's own calls
    for advice in ADVICE:
        warnings.filterwarnings("ignore", advice)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: "Tip:" not in record.getMessage()
    )
    return command(
        AgentModule,
        RolloutDataModule,
        args=shipped_files(arguments),
        trainer_defaults=TRAINER_DEFAULTS,
        save_config_kwargs={"overwrite": True},
        seed_everything_default=0,
        parser_kwargs={"prog": "sorl", "allow_abbrev": False, "exit_on_error": False},
        auto_configure_optimizers=False,
    )


# Commands beside LightningCLI's: modules, each with a function, or functions by name, under its own name.
COMMANDS = (
    "callbacks",
    "completion",
    "configs",
    "data",
    "demo",
    "doctor",
    "envs",
    "experts",
    "export",
    "report",
    "rollout",
    "tokenizer",
)


def main(arguments: Sequence[str] | None = None) -> Any:
    """Entry point; errors that a user can act on are one sentence (``--debug`` shows where they came from)."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    sys.path.insert(0, os.getcwd())  # class paths may name the user's own modules, as with python -m
    transformers.utils.logging.disable_progress_bar()
    try:
        with stoppable():
            if not arguments or arguments[0] in ("-h", "--help"):
                front_page(COMMANDS)
            elif arguments[0] == "--version":
                print(f"sorl {metadata.version('sorl-lightning')}")
            elif asks_for_page(arguments):
                subcommand_page(arguments[0], (*arguments, None)[2], run)
            elif arguments[0] in COMMANDS:
                module = importlib.import_module(f"sorl_lightning.commands.{arguments[0]}")
                # A module may read its words in a way of its own.
                words = getattr(module, "words", list)(arguments[1:])
                prog = f"sorl {arguments[0]}"
                settings: dict[str, Any] = {"prog": prog, "allow_abbrev": False, "exit_on_error": False}
                auto_cli(getattr(module, arguments[0]), args=words, **settings)
            else:
                check_command(arguments[0], COMMANDS)
                run(arguments)
    except Stopped as stop:
        print(f"sorl: {stop}", flush=True)
        raise
    except (ConfigurationError, RolloutError, TrainingError, ArgumentError, MisconfigurationException) as error:
        if debug:
            raise
        words = one_sentence(error)
        if isinstance(error, ArgumentError):
            words = f"{shortened(words)}; {next_step(words, arguments, run)}"
        sys.exit(f"sorl: {words}")
