"""What a run left behind, as it is: figures, settings, trajectories."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.trajectory_files import TrajectoryFiles

EVENTS = "events.out.tfevents.*"
BY_COLLECTION = "by_collection"


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A scalar tag of an event file; the three sequences are of one length.

    Attributes:
        steps: its x in TensorBoard.
        seconds: wall-clock time since the file began.
        values: single precision, as the file has them.
    """

    steps: Sequence[int]
    seconds: Sequence[float]
    values: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run to report.

    Attributes:
        folder: with the event files.
        label: what it is called in the report.
        figures: by tag, against optimiser steps.
        by_collection: by tag, against collections; empty where no CollectionAxis wrote them.
        config: of config.yaml; empty where there is none.
        trajectories: the log, empty where there is none.
    """

    folder: Path
    label: str
    figures: Mapping[str, Series]
    by_collection: Mapping[str, Series]
    config: Mapping[str, Any]
    trajectories: TrajectoryFiles


def found_run(place: str) -> tuple[Path, int]:
    """The folder of the run in or below ``place``, the latest of several, and how many there are.

    What ``sorl validate`` and ``sorl test`` have written counts only where nothing was trained.

    Raises:
        ConfigurationError: there is none.
    """
    root = Path(place)
    if not root.is_dir():
        raise ConfigurationError(f"runs: {place!r} is not a folder: name one that a sorl fit has written")
    if has_events(root):
        return root, 1
    folders = [
        Path(path) for path, _, _ in os.walk(root) if has_events(Path(path)) and Path(path).name != BY_COLLECTION
    ]
    if not folders:
        raise ConfigurationError(
            f"runs: {place!r} is no run: there is no TensorBoard event file ({EVENTS}) in it or below it"
        )
    trained = [folder for folder in folders if (folder / BY_COLLECTION).is_dir()] or folders
    return max(trained, key=lambda folder: max(file.stat().st_mtime for file in folder.glob(EVENTS))), len(folders)


def has_events(folder: Path) -> bool:
    """Whether TensorBoard would show this folder as a run."""
    return any(folder.glob(EVENTS))


def read_run(folder: Path, label: str) -> Run:
    """Everything that the report shows of a run.

    Raises:
        ConfigurationError: its event files hold no figure, or its config.yaml is none.
    """
    figures = read_figures(folder)
    if not figures:
        raise ConfigurationError(
            f"runs: the event files of {str(folder)!r} hold no figure yet: no collection is over; name another run"
        )
    path = folder / "config.yaml"
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except yaml.YAMLError as error:
        raise ConfigurationError(f"runs: {str(path)!r} is no YAML: {error}") from error
    return Run(
        folder=folder,
        label=label,
        figures=figures,
        by_collection=read_figures(folder / BY_COLLECTION),
        config=config if isinstance(config, dict) else {},
        trajectories=TrajectoryFiles(folder / "trajectories"),
    )


def read_figures(folder: Path) -> dict[str, Series]:
    """All scalars of a folder's event files; of a step that was written again, by a resumed run, the later value."""
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    if not folder.is_dir() or not has_events(folder):
        return {}
    events = EventAccumulator(str(folder), size_guidance={SCALARS: 0})
    events.Reload()
    start = events.FirstEventTimestamp()
    return {tag: series_of(events.Scalars(tag), start) for tag in events.Tags()["scalars"]}


def series_of(events: Sequence[Any], start: float) -> Series:
    """TensorBoard's events of one tag, in the order of their steps."""
    latest = {event.step: event for event in events}
    ordered = [latest[step] for step in sorted(latest)]
    return Series(
        steps=[event.step for event in ordered],
        seconds=[event.wall_time - start for event in ordered],
        values=[event.value for event in ordered],
    )


def labels_of(folders: Sequence[Path]) -> list[str]:
    """Short names: what is left of each path without what they all have in common; one run keeps its last two parts."""
    parts = [[part for part in folder.resolve().parts if part != "lightning_logs"] for folder in folders]
    if len(parts) == 1:
        return ["/".join(parts[0][-2:])]
    while len({path[0] for path in parts}) == 1 and min(map(len, parts)) > 1:
        parts = [path[1:] for path in parts]
    while len({path[-1] for path in parts}) == 1 and min(map(len, parts)) > 1:
        parts = [path[:-1] for path in parts]
    return ["/".join(path) for path in parts]
