"""The report as one HTML file that needs nothing else."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import numpy as np
import orjson

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.report.charts import TURN_FIGURES, Section, drawn, missing, turn_depth
from sorl_lightning.report.runs import Run, Series
from sorl_lightning.report.settings import settings_of
from sorl_lightning.report.trajectories import browsed, spaced

MOST_RUNS = 8  # hues that can be told apart, also by the colour-blind
MOST_POINTS = 1000  # of a curve: more than a screen has room for


def page(runs: Sequence[Run], trajectories: int = 1000) -> str:
    """The HTML.

    Args:
        runs: one, or several to compare.
        trajectories: most in the browser, over all runs.

    Raises:
        ConfigurationError: more runs than hues, no Jinja, or a trajectory log that cannot be read.
    """
    if len(runs) > MOST_RUNS:
        raise ConfigurationError(f"runs: at most {MOST_RUNS} can be told apart by their colours, got {len(runs)}")
    environment = _templates()
    sections = drawn(runs)
    heat_maps = {name: figure for name, figure in TURN_FIGURES.items() if any(turn_depth(run, name) for run in runs)}
    browser = browsed(runs, trajectories)
    data = {
        "runs": [run_data(run, sections, heat_maps) for run in runs],
        "charts": {section.name: [dataclasses.asdict(chart) for chart in section.charts] for section in sections},
        "heat_maps": heat_maps,
        "browser": browser,
    }
    settings = settings_of(runs)
    return environment.get_template("report.html.j2").render(
        runs=runs,
        summaries=[summary(run) for run in runs],
        sections=sections,
        heat_maps=heat_maps,
        browser=browser,
        differences=[setting for setting in settings if setting.differs],
        common=[setting for setting in settings if not setting.differs],
        gaps=[missing(run) for run in runs],
        data=embedded(data),
        asset=asset,
    )


def _templates() -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise ConfigurationError("sorl report needs Jinja: pip install 'sorl-lightning[report]'") from error
    return jinja2.Environment(
        loader=jinja2.FunctionLoader(asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def asset(name: str) -> str:
    """A template, style sheet or script of the package."""
    folder = "vendor" if name.endswith(".min.js") else "templates"
    return (files("sorl_lightning.report") / folder / name).read_text(encoding="utf-8")


def embedded(data: Any) -> str:
    """JSON for a script element, which a text in it cannot end; single precision by its shortest digits."""
    text = orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS).decode()
    return text.replace("<", "\\u003c")


def run_data(run: Run, sections: Sequence[Section], heat_maps: dict[str, Any]) -> dict[str, Any]:
    """A run's figures that are drawn, by tag."""
    tags = [line.tag for section in sections for chart in section.charts for line in chart.lines]
    turns = [f"turns/{name}/{turn}" for name in heat_maps for turn in range(turn_depth(run, name))]
    steps = tags if run.by_collection else [*tags, *turns]  # maps are against collections, where that is known
    return {
        "label": run.label,
        "figures": {tag: thinned(run.figures[tag]) for tag in steps if tag in run.figures},
        "by_collection": {tag: thinned(run.by_collection[tag]) for tag in (*tags, *turns) if tag in run.by_collection},
    }


def thinned(series: Series) -> dict[str, Any]:
    """A series, and how many values it had before those between evenly spaced ones were left out."""
    kept = sorted(spaced(len(series.values), MOST_POINTS))
    return {
        "steps": [series.steps[place] for place in kept],
        "seconds": [round(series.seconds[place], 2) for place in kept],
        "values": np.array([series.values[place] for place in kept], dtype=np.float32),
        "of": len(series.values),
    }


def summary(run: Run) -> dict[str, str]:
    """The line of a run in the table at the top."""
    success, held_out = run.figures.get("rollout/success"), run.figures.get("val/success")
    tokens = run.figures.get("throughput/generated_tokens_per_second")
    updates = run.figures.get("policy_version")
    every = [series for series in run.figures.values() if series.values]
    figures = {
        "Success, last collection": success and f"{success.values[-1]:.3f}",
        "Success, best collection": success and f"{max(success.values):.3f}",
        "Validation success, last": held_out and f"{held_out.values[-1]:.3f}",
        "Collections": success and f"{len(success.values):,}",
        "Updates": updates and f"{int(updates.values[-1]):,}",
        "Wall-clock time": duration(max(series.seconds[-1] for series in every)),
        "Generated tokens a second, median": tokens and f"{statistics.median(tokens.values):,.0f}",
    }
    return {name: value for name, value in figures.items() if value}


def duration(seconds: float) -> str:
    """Hours and minutes, or minutes and seconds."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
