"""Help that fits a screen: the front page, a page a subcommand, and the options of one topic at a time."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
from collections.abc import Callable, Iterable, Sequence

from sorl_lightning.commands.listing import summary
from sorl_lightning.errors import ConfigurationError

SUBCOMMANDS = {
    "fit": "Train: roll out, update, validate; figures in TensorBoard.",
    "validate": "Roll out the validation tasks with a checkpoint, an expert, or chance.",
    "test": "The same with the test tasks.",
}
EXAMPLES = """examples:
  sorl demo
  sorl fit --config sorl:quickstart --config sorl:clipping_triggered_normalization
  sorl test --config sorl:quickstart --ckpt_path runs/.../last.ckpt"""
TOPICS = {
    "model": "the policy, its objective, optimizer, reference, teacher and critic",
    "data": "the environment, the engine, the sizes of a collection and of its updates",
    "trainer": "Lightning's: max_epochs (collections), devices, strategy, gradient_clip_val, callbacks",
    "checkpoint": "what is saved, when, and where; best_checkpoint likewise",
    "trajectory_log": "sampled episodes with every token's figures: how many, how often",
    "hf_export": "a Hugging Face folder at the end",
    "warm_start": "a model that another config trains first",
}
HOW = """--config sorl:NAME ships with the package (sorl configs, sorl callbacks), --config FILE is yours. Later wins.

  --print_config                    the whole config that would run, and nothing else
  --data.environment.help CLASS     options of a class: also model.policy, model.objective, data.engine, ... (sorl envs)
  --ckpt_path FILE                  resume, or what to measure
  --debug                           where an error came from

sorl {name} --help TOPIC lists options:
"""


def front_page(commands: Iterable[str]) -> None:
    """Print what ``sorl`` can do: LightningCLI's subcommands, and ``commands``, a line each."""
    print("usage: sorl COMMAND ...        sorl COMMAND --help says more\n")
    for name, line in SUBCOMMANDS.items():
        print(f"  {name:<12}{line}")
    print()
    for name in commands:
        module = importlib.import_module(f"sorl_lightning.commands.{name}")
        line = summary(module).partition(": ")[2]
        print(f"  {name:<12}{line[:1].upper()}{line[1:]}")
    print(f"\n{EXAMPLES}")


def asks_for_page(arguments: Sequence[str]) -> bool:
    """Whether ``arguments`` are a subcommand of LightningCLI and a plain call for help."""
    return len(arguments) in (2, 3) and arguments[0] in SUBCOMMANDS and arguments[1] in ("-h", "--help")


def subcommand_page(name: str, topic: str | None, run: Callable[[list[str]], object]) -> None:
    """Print the page of a subcommand, or the options of one of its topics; "all" is everything.

    Args:
        run: runs the subcommand; asked for its help.

    Raises:
        ConfigurationError: there is no such topic.
    """
    if topic is None:
        print(f"usage: sorl {name} --config CONFIG [--config SWITCH ...] [--OPTION VALUE ...]\n\n{SUBCOMMANDS[name]}")
        print(HOW.format(name=name))
        for one, line in {**TOPICS, "all": "everything"}.items():
            print(f"  {one:<16}{line}")
        return
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        run([name, "--help"])
    found = text.getvalue() if topic == "all" else options_of(text.getvalue(), topic)
    if not found:
        raise ConfigurationError(f"--help {topic}: there is no such topic; there are {', '.join(TOPICS)} and all")
    print(found)


def options_of(text: str, topic: str) -> str:
    """Entries of a help text whose options begin with ``topic``."""
    entries = re.split(r"\n(?=  -)|\n(?=\S)|\n\n", text.partition("\noptions:")[2])
    return "\n".join(entry for entry in entries if re.match(rf"  --{re.escape(topic)}(\.| |$)", entry))
