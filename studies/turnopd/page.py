"""From raw files to docs/results/turnopd.md."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from studies.turnopd.arms import ARMS, PHASES

Run = dict[str, Any]
PAPER = """| task, student | vanilla OPD: least-time / same-step / hours | TCOD-F2B | TurnOPD |
|---|---|---|---|
| ALFWorld 1.7B | 73.52 / 83.00 / 4.42 | 80.06 / 80.06 / 1.87 | 85.60 / 86.29 / 1.93 (2.29x faster) |
| ALFWorld 4B | 90.79 / 91.81 / 2.86 | 86.50 / 86.50 / 1.89 | 91.73 / 92.21 / 2.16 (1.33x) |
| Search 2B | 45.77 / 47.82 / 4.45 | 45.64 / 47.77 / 3.80 | 47.24 / 47.24 / 2.94 (1.51x) |
| WebShop 1.7B | 76.98 / 81.65 / 1.57 | 80.45 / 81.66 / 1.33 | 82.80 / 82.80 / 1.24 (1.26x) |

Its ablation on ALFWorld 1.7B (same-step / hours): vanilla 83.0 / 4.42, depth only 82.8 / 1.96, blend only 85.1 / 2.59,
both 86.3 / 1.93, hard turn normalisation 85.0."""


def spent(evaluation: dict[str, float]) -> float:
    """Processor seconds of training up to an evaluation; validation itself does not count."""
    return sum(evaluation[f"cpu_{phase}"] for phase in PHASES if phase != "validation")


def training_seconds(run: Run) -> float:
    return sum(run["cpu"][phase] for phase in PHASES if phase != "validation")


def accuracy(run: Run, until: float = float("inf")) -> float:
    """Mean of the last four evaluations made within ``until`` processor seconds of training."""
    made = [evaluation["success"] for evaluation in run["evaluations"] if spent(evaluation) <= until]
    return statistics.mean(made[-4:]) if made else 0.0


def time_to(run: Run, goal: float) -> float | None:
    """Processor seconds after which the mean of the last four evaluations reaches ``goal``; None: never."""
    for number, evaluation in enumerate(run["evaluations"]):
        if number >= 3 and statistics.mean(e["success"] for e in run["evaluations"][number - 3 : number + 1]) >= goal:
            return spent(evaluation)
    return None


def spread(values: list[float], digits: int = 1, scale: float = 1.0) -> str:
    """Mean and standard deviation over seeds."""
    if not values:
        return "-"
    deviation = f" ± {scale * statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{scale * statistics.mean(values):.{digits}f}{deviation}"


def shares(run: Run) -> tuple[float, float]:
    """Share of the first three turns and of the deepest third of those reached in the loss, last ten collections."""
    first, deepest = [], []
    for collection in run["history"][-10:]:
        share = collection["loss_share"]
        first.append(sum(share[:3]))
        deepest.append(sum(share[-(len(share) // 3) :]) if len(share) >= 3 else 0.0)
    return statistics.mean(first), statistics.mean(deepest)


def load(results: Path) -> dict[str, dict[int, Run]]:
    """Finished runs by arm and seed."""
    runs: dict[str, dict[int, Run]] = defaultdict(dict)
    for path in sorted(results.glob("*-*.json")):
        run = json.loads(path.read_text())
        runs[run["arm"]][run["seed"]] = run
    return runs


def main_table(runs: dict[str, dict[int, Run]]) -> list[str]:
    vanilla = runs.get("vanilla", {})
    least = {seed: min(training_seconds(runs[a][seed]) for a in runs if seed in runs[a]) for seed in vanilla}
    lines = [
        "| arm | seeds | least-time accuracy, % | same-step accuracy, % | training, cpu s "
        "| time to vanilla's final accuracy: / vanilla's whole time, by seed | / vanilla's own time to it, by seed |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm in ARMS:
        found = {seed: run for seed, run in runs.get(arm, {}).items() if seed in vanilla}
        if not found:
            continue
        ratios: list[list[str]] = [[], []]
        for seed, run in found.items():
            goal = accuracy(vanilla[seed])
            reached, own = time_to(run, goal), time_to(vanilla[seed], goal)
            for column, whole in zip(ratios, (training_seconds(vanilla[seed]), own), strict=True):
                column.append("never" if reached is None or whole is None else f"{reached / whole:.2f}")
        lines.append(
            f"| {arm} | {len(found)} | {spread([accuracy(r, least[s]) for s, r in found.items()], scale=100)} | "
            f"{spread([accuracy(r) for r in found.values()], scale=100)} | "
            f"{spread([training_seconds(r) for r in found.values()])} | {' | '.join(map(', '.join, ratios))} |"
        )
    return lines


def detail_tables(runs: dict[str, dict[int, Run]]) -> list[str]:
    lines = [
        "| arm | " + " | ".join(f"{phase}, cpu s" for phase in PHASES) + " | wall s |",
        "|---" * (len(PHASES) + 2) + "|",
    ]
    for arm in ARMS:
        if found := list(runs.get(arm, {}).values()):
            cells = [spread([run["cpu"][phase] for run in found]) for phase in PHASES]
            lines.append(f"| {arm} | {' | '.join(cells)} | {spread([sum(run['wall'].values()) for run in found], 0)} |")
    lines += [
        "",
        "| arm | first three turns' loss share, % | deepest third's, % | turn limit at 25/50/75/100 %, probes aside |",
        "|---|---|---|---|",
    ]
    for arm in ARMS:
        if found := list(runs.get(arm, {}).values()):
            pairs = [shares(run) for run in found]
            depths = []
            for quarter in (1, 2, 3, 4):
                # The collection before: the last of a quarter may be a probe.
                limits = [run["history"][max(0, len(run["history"]) * quarter // 4 - 2)]["turn_limit"] for run in found]
                depths.append(spread([float(limit) for limit in limits], 0))
            cells = [spread([pair[side] for pair in pairs], scale=100) for side in (0, 1)]
            lines.append(f"| {arm} | {cells[0]} | {cells[1]} | {' / '.join(depths)} |")
    return lines


def world_table(results: Path) -> list[str]:
    """What teacher and student can do before they meet."""
    models = json.loads((results / "models.json").read_text())
    counts = list(next(iter(models["success"].values())))
    return [
        f"Sampled success at temperature 1 on {models['tasks']} test tasks, %, by random actions played before:",
        "",
        "| model | " + " | ".join(counts) + " |",
        "|---" * (len(counts) + 1) + "|",
        *(
            f"| {name} | " + " | ".join(f"{100 * found[count]:.1f}" for count in counts) + " |"
            for name, found in models["success"].items()
        ),
    ]


def curve_table(runs: dict[str, dict[int, Run]]) -> list[str]:
    """Success at each evaluation, mean over seeds, with the time it had taken."""
    lines = ["| arm | success, % (training, cpu s) at each evaluation, means over seeds |", "|---|---|"]
    for arm in ARMS:
        if found := list(runs.get(arm, {}).values()):
            cells = [
                f"{100 * statistics.mean(e['success'] for e in at):.0f} ({statistics.mean(map(spent, at)):.0f})"
                for at in zip(*(run["evaluations"] for run in found), strict=True)
            ]
            lines.append(f"| {arm} | {', '.join(cells)} |")
    return lines


def token_divergence(collection: dict[str, Any]) -> float:
    """Mean of the turns' divergences, each as often as trajectories reached it, nats a token."""
    reached = collection["survivors"]
    return sum(d * n for d, n in zip(collection["divergence"], reached, strict=True)) / sum(reached)


def weak_table(results: Path) -> list[str]:
    """What becomes of a student who cannot do much yet; nothing where it was not run."""
    runs = {path.stem: json.loads(path.read_text()) for path in sorted((results / "weak_student").glob("*.json"))}
    if not runs:
        return []
    lines = [
        "## A weaker student",
        "",
        "`python -m studies.turnopd.weak`: the student after half of its imitation, vanilla distillation, one seed "
        "each; raw files in `studies/results/turnopd/weak_student/`.",
        "",
        "| run | success before, % | at each evaluation, % | divergence of the first and last collection, nats a token |",
        "|---|---|---|---|",
    ]
    for name, run in runs.items():
        successes = ", ".join(f"{100 * evaluation['success']:.0f}" for evaluation in run["evaluations"])
        ends = ", ".join(f"{token_divergence(run['history'][end]):.2f}" for end in (0, -1))
        lines.append(f"| {name} | {100 * run['start']:.0f} | {successes} | {ends} |")
    return [*lines, ""]


def world_text(some: Run) -> str:
    return (
        "World: `coin` of TextWorldExpress, four rooms, admissible actions shown, at most 16 turns; "
        f"{some['collections']} collections of 32 trajectories, one update each, AdamW at 1e-3, reverse KL over the full "
        f"vocabulary. Success is sampled at temperature .85 on {some['tasks']} held-out tasks; accuracy is the mean of "
        "the last four evaluations. Time is processor time of the training process, one thread, without validation; the "
        "game's Java is not counted. Spreads are standard deviations over seeds. Least-time: accuracy at the time at "
        "which the first arm of the seed ends; same-step: at the end."
    )


def write(results: Path, page: Path) -> None:
    """Write the page from what has finished."""
    runs = load(results)
    if not runs:
        return
    some = next(iter(next(iter(runs.values())).values()))
    reading = results / "reading.md"
    count = sum(map(len, runs.values()))
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join([
        "# TurnOPD at the size of one machine", "", "`python -m studies.turnopd` makes this page from the raw files in "
        f"`studies/results/turnopd/`, one a run: {count} runs. Teacher and student come from "
        "`sorl fit --config sorl:coin_teacher`.", "", world_text(some), "", *world_table(results), "",
        "## Accuracy and time", "", *main_table(runs), "", *curve_table(runs), "",
        "## The paper's own table", "", PAPER, "",
        "## Time by phase, loss by turn, depth", "", *detail_tables(runs), "",
        *weak_table(results), *(["## Reading", "", reading.read_text().strip(), ""] if reading.exists() else []),
    ]))  # fmt: skip
