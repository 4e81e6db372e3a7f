"""Which figures the report draws, in which order, and what each is called."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from sorl_lightning.report.runs import Run


@dataclass(frozen=True, slots=True)
class Line:
    """A tag in a chart.

    Attributes:
        tag: in the event file.
        label: in the chart's legend.
        style: how it is drawn; the hue is the run's.
    """

    tag: str
    label: str
    style: str = "solid"


@dataclass(frozen=True, slots=True)
class Chart:
    """Some tags of one unit against collections, optimiser steps or time.

    Attributes:
        unit: of its y-axis.
        note: what to read from it.
        share: whether its values are shares, from 0 to 1.
        axis: the x-axis that it always has; empty follows the reader's choice.
        logarithmic: whether its y-axis is.
        knob: whether it shows a knob, which at rest is 0 and not drawn.
    """

    title: str
    unit: str
    lines: tuple[Line, ...]
    note: str = ""
    share: bool = False
    axis: str = ""
    logarithmic: bool = False
    knob: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """Charts under one heading."""

    name: str
    title: str
    charts: tuple[Chart, ...]


SUCCESS = (Line("rollout/success", "training rollouts"), Line("val/success", "validation", "marked"))


def both(name: str) -> tuple[Line, ...]:
    """The norms as ClippingTriggeredNormalization or, measured only, ClippingMonitor wrote them."""
    return Line(f"{name}/policy_norm", "policy gradient"), Line(f"{name}/bias_norm", "clipping bias", "dashed")


SECTIONS = (
    Section("success", "Success", (
        Chart("Success by collection", "share of trajectories", SUCCESS, share=True, axis="collection"),
        Chart("Success by wall-clock time", "share of trajectories", SUCCESS, share=True, axis="time"),
        Chart("Return", "reward of a trajectory", (
            Line("rollout/return", "training rollouts"), Line("val/return", "validation", "marked"))),
        Chart("Cut off", "share of trajectories", (
            Line("rollout/ending/turn_limit", "turn limit"),
            Line("rollout/ending/context_limit", "context limit", "dashed")),
            "Trajectories that ended before the task did.", share=True),
    )),
    Section("clipping", "Clipping", (
        Chart("Clipped", "share", (
            Line("train/clip_fraction", "of tokens"),
            Line("train/clip_fraction_turns", "of turns, with a clipped token", "dashed")),
            "A clipped token has no gradient.", share=True),
        Chart("Importance ratio, mean", "ratio", (Line("train/ratio", "mean over tokens"),)),
        Chart("Importance ratio, largest", "ratio", (
            Line("train/ratio_max", "largest of an update"),), logarithmic=True),
        Chart("KL from the collection's policy", "nats a token", (Line("train/policy_kl", "k3"),)),
        Chart("KL of trainer and engine", "nats a token", (
            Line("train/mismatch_kl", "mean"), Line("train/mismatch_kl_max", "largest", "dashed"))),
    )),
    Section("bias", "Clipping bias", (
        Chart("Gradient and clipping bias, acted on", "L2 norm", both("normalization")),
        Chart("Factor of the policy gradient", "factor", (Line("normalization/factor", "applied"),)),
        Chart("Updates with a clipped token", "share of updates so far", (
            Line("normalization/triggered", "triggered"),), share=True),
        Chart("Gradient and clipping bias, measured", "L2 norm", both("clipping")),
        Chart("Factor that normalization would apply", "factor", (Line("clipping/factor", "not applied"),)),
        Chart("Updates with a clipped token, measured", "share of updates so far", (
            Line("clipping/triggered", "triggered"),), share=True),
    )),
    Section("depth", "Depth", (
        Chart("Depth control", "turns", (
            Line("depth/cap", "next cap"), Line("depth/smoothed", "smoothed", "dashed"),
            Line("depth/effective", "effective", "dotted"), Line("depth/coverage", "coverage", "marked"))),
        Chart("Turn limit and turns played", "turns", (
            Line("rollout/turn_limit", "limit", "dashed"), Line("rollout/turns", "played, mean"))),
        Chart("Rollout time saved", "seconds", (Line("depth/seconds_saved", "against the last probe, summed"),)),
    )),
    Section("learning", "Learning", (
        Chart("Entropy", "nats a token", (Line("train/entropy", "policy"),)),
        Chart("Divergence from the teacher", "nats a token", (
            Line("train/divergence", "training rollouts"), Line("val/divergence", "validation", "marked"))),
        Chart("KL from the reference", "nats a token", (Line("train/reference_kl", "k1"),)),
        Chart("Negative log-likelihood", "nats a token", (
            Line("train/nll", "of the expert's tokens"), Line("val/nll", "validation", "marked"))),
        Chart("Gradient norm", "L2 norm", (
            Line("train/grad_norm", "before clipping by norm"), Line("train/grad_norm_clipped", "after", "dashed"))),
        Chart("Groups without signal", "share of groups", (
            Line("rollout/constant_groups", "all siblings one reward"),), share=True),
        Chart("Explained variance of the critic", "share of variance", (Line("critic/explained_variance", "critic"),)),
        Chart("Weight of turns in the loss", "share", (
            Line("kl_schedule/turn_blend", "0: trajectories, 1: turns"),), share=True, knob=True),
    )),
    Section("throughput", "Throughput", (
        Chart("Tokens", "tokens a second", (
            Line("throughput/generated_tokens_per_second", "generated"),
            Line("throughput/trained_tokens_per_second", "trained", "dashed"))),
        Chart("Time of a collection's rollouts", "seconds", (Line("rollout/seconds", "rollouts"),)),
        Chart("Length of a trajectory", "tokens", (
            Line("rollout/tokens", "training rollouts"), Line("val/tokens", "validation", "marked"))),
    )),
)  # fmt: skip

# Figures by turn, in heat maps: the part of turns/NAME/N that varies, what it is, its unit.
TURN_FIGURES = {
    "clip_fraction": ("Clipped", "share of tokens"),
    "ratio": ("Importance ratio", "mean"),
    "kl": ("KL from the collection's policy", "nats a token"),
    "entropy": ("Entropy", "nats a token"),
    "advantage_variance": ("Variance of the advantage", "squared rewards"),
}

# What a report has only if something wrote it, by the first letters of its tags.
SOURCES = {
    "rollout/": "AgentModule",
    "val/": "validation (trainer.limit_val_batches, trainer.check_val_every_n_epoch)",
    "train/clip_fraction": "an objective that clips",
    "normalization/ clipping/": "ClippingTriggeredNormalization or ClippingMonitor",
    "turns/": "ClippingMonitor",
    "depth/": "RolloutDepthController",
    "throughput/": "AgentModule",
}


def held(run: Run, tag: str, axis: str) -> bool:
    """Whether the run wrote a tag against an axis; the empty one is any."""
    return (axis != "collection" and tag in run.figures) or (axis != "time" and tag in run.by_collection)


def drawn(runs: Sequence[Run]) -> list[Section]:
    """The sections with what some run wrote; no chart is empty, and depth shows where something controlled it."""
    sections = []
    for section in SECTIONS:
        if section.name == "depth" and not any(tag.startswith("depth/") for run in runs for tag in run.figures):
            continue
        charts = [present(chart, runs) for chart in section.charts]
        if kept := tuple(chart for chart in charts if chart.lines):
            sections.append(Section(section.name, section.title, kept))
    return sections


def present(chart: Chart, runs: Sequence[Run]) -> Chart:
    """A chart with the lines that some run wrote."""
    lines = tuple(line for line in chart.lines if any(held(run, line.tag, chart.axis) for run in runs))
    if chart.knob and not any(turned(run, line.tag) for run in runs for line in lines):
        lines = ()
    return dataclasses.replace(chart, lines=lines)


def turned(run: Run, tag: str) -> bool:
    """Whether a tag was ever other than 0."""
    return tag in run.figures and any(run.figures[tag].values)


def turn_depth(run: Run, figure: str) -> int:
    """Turns of which the run wrote a figure."""
    start = f"turns/{figure}/"
    numbers = [int(tag[len(start) :]) for tag in run.by_collection or run.figures if tag.startswith(start)]
    return max(numbers, default=-1) + 1


def missing(run: Run) -> list[tuple[str, str]]:
    """What the report cannot show of a run, and where it would have come from."""
    tags = {*run.figures, *run.by_collection}
    gaps = [
        (names, source)
        for names, source in SOURCES.items()
        if not any(tag.startswith(name) for tag in tags for name in names.split())
    ]
    if not run.by_collection:
        gaps.append(("by_collection", "CollectionAxis; without it nothing is drawn against collections"))
    if not run.config:
        gaps.append(("config.yaml", "the command sorl fit"))
    if not any(run.trajectories.lines()):
        gaps.append(("trajectories/", "TrajectoryLog (trajectory_log.count, trajectory_log.every_n_collections)"))
    return gaps
