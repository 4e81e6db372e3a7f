"""``sorl report RUN [RUN ...]``: one HTML file that shows a run, or compares several."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from sorl_lightning.checkpoints import install, unfinished
from sorl_lightning.errors import ConfigurationError

FLAGS = ("-h", "--help", "--print_config")  # options without a value


def words(arguments: Sequence[str]) -> list[str]:
    """Arguments with the runs, which are words of their own, as the one list that ``report`` takes.

    Raises:
        ConfigurationError: there is no run.
    """
    runs: list[str] = []
    options: list[str] = []
    for word in arguments:
        valued = options and options[-1].startswith("--") and "=" not in options[-1] and options[-1] not in FLAGS
        (options if word.startswith("-") or valued else runs).append(word)
    if not runs and not any(option in FLAGS for option in options):
        raise ConfigurationError("runs: name at least one folder that a sorl fit has written, as in sorl report RUN")
    return [*([json.dumps(runs)] if runs else []), *options]


def report(
    runs: list[str], output: str = "report.html", labels: list[str] | None = None, trajectories: int = 1000
) -> None:
    """Write a report of runs: success, clipping, depth and throughput, settings that differ, and their trajectories.

    The file needs no server and no network.

    Args:
        runs: folders, one or several words: each of a run, or with runs below it, of which the latest is taken.
        output: the HTML file; one that is there is replaced.
        labels: what the runs are called, such as '[token,turn]'; null takes what differs in their paths.
        trajectories: most in the browser, over all runs.
    """
    from sorl_lightning.report.page import page
    from sorl_lightning.report.runs import found_run, labels_of, read_run

    if trajectories < 0:
        raise ConfigurationError(f"trajectories must be 0 or more, got {trajectories}")
    if labels is not None and len(labels) != len(runs):
        raise ConfigurationError(f"labels: one a run is needed, {len(runs)} in all, got {len(labels)}")
    target = Path(output)
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise ConfigurationError(f"output: {output!r} must be a file in a folder that exists")
    folders = []
    for place in runs:
        folder, count = found_run(place)
        if count > 1:
            print(f"sorl: {place} holds {count} runs; the latest that trained is {folder}")
        if folder in folders:
            raise ConfigurationError(f"runs: {str(folder)!r} is given twice")
        folders.append(folder)
    found = [read_run(f, label) for f, label in zip(folders, labels or labels_of(folders), strict=True)]
    unfinished(target).write_text(page(found, trajectories), encoding="utf-8")
    install(unfinished(target), target)
    print(f"sorl: wrote {target} ({target.stat().st_size / 1e6:.1f} MB)")
