"""The page of the study, made from the files that its runs left."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from studies.stability.cells import SCOUTED
from studies.stability.figures import Figures, Record, figures, last_fifth, load, pools
from studies.stability.plot import draw
from studies.stability.regimes import REGIMES, Regime

HEAD = """# Stability under off-policy updates

`python -m studies.stability` trains every cell below in every regime and writes this page; `--quick` is the same in minutes, `--page` writes the page
only. A run is one process with one thread; its raw curves are a file of `studies/results/stability/`, with the command that made them. What has a file
is not run again.

**Cells.** {token, turn} ratio x {nothing, clipping-triggered normalization, rule `relative`} x {GRPO, PPO}; GRPO with a third of the learning rate; GSPO
with its own clip range; GRPO with one pass over each collection and as many more collections (the same number of updates, closer to the policy that
sampled). Everything else is a regime's, and the same in all its cells: no cell was tuned. PPO's critic has a backbone of its own and the policy's learning
rate. Gradient norms are clipped at 1, nothing holds the policy near the reference.

**Collapsed**: success stayed below half of the run's best for the whole last fifth of its collections. **Final success**: mean over the last fifth of
the collections of the training rollouts, mean ± standard deviation over seeds, and each seed. **Clipped**: share of generated tokens, and of turns with
such a token, over the updates of the first collection, where all cells have the same rollouts. **Dead groups**: all rewards equal, so that a group advantage is 0; last fifth.
**||C||**: norm of the clipping bias, largest mean of a collection, median over seeds. **Factor**: by which the normalization scales
the policy gradient, mean over the run; in cells without it, what it would have been. CPU seconds are those of the run's process, without the game's Java process."""
COLUMNS = {
    "cell": "", "seeds": "seeds", "collapsed": "collapsed", "final success": "final", "each seed": "each", "best": "best",
    "clipped tokens": "clipped_tokens", "clipped turns": "clipped_turns", "dead groups": "dead", "&#124;&#124;C&#124;&#124;": "bias", "factor": "factor",
    "entropy": "entropy", "critic's explained variance": "explained", "CPU s a run": "cpu",
}  # fmt: skip


def line(values: Sequence[str]) -> str:
    """Of a table."""
    return f"| {' | '.join(values)} |"


def table(cells: Mapping[str, Figures]) -> str:
    """A line a cell."""
    rows = [[name, *(str(getattr(found, key)) for key in COLUMNS.values() if key)] for name, found in cells.items()]
    return "\n".join([line(list(COLUMNS)), "|---" * len(COLUMNS) + "|", *map(line, rows)])


def description(regime: Regime) -> str:
    """The regime in words, from its YAML."""
    data, setting = regime.data, regime.setting
    return (
        f"{data['tasks_per_collection']} tasks x {data['group_size']} siblings a collection, {regime.collections} collections, "
        f"{data['mini_batches'] * data['passes']} updates each ({data['mini_batches']} mini-batches x {data['passes']} passes), AdamW at "
        f"{setting.learning_rate:g}, clip range {setting.clip_range:g}: `studies/stability/{regime.base.name}`, from the warm start "
        f"`{regime.warm_start}`. {regime.reason}"
    )


def grid(regime: Regime, folder: Path) -> str:
    """What the scouting found, a line a setting."""
    found: dict[str, dict[str, Record]] = {}
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text())
        found.setdefault(f"{record['learning_rate']:g} | {record['clip_range']:g}", {})[record["cell"]] = record
    names = [cell.name for cell in SCOUTED]
    rows = [
        f"| {setting} | {' | '.join(success(runs[name]) if name in runs else '-' for name in names)} |"
        for setting, runs in found.items()
    ]
    head = f"| learning rate | clip range | {' | '.join(f'{name}: first, last fifth, best' for name in names)} |"
    command = f"`python -m studies.stability --scout {regime.name}`, one seed, {regime.scouted_collections} collections"
    return "\n".join([f"Scouting ({command}):\n", head, "|---" * (2 + len(names)) + "|", *rows])


def success(record: Record) -> str:
    """First, last fifth and best of a scouting run."""
    curve = record["curves"]["success"]
    late = last_fifth(curve)
    return f"{curve[0]:.2f}, {sum(late) / len(late):.2f}, {max(curve):.2f}"


def counted(results: dict[str, list[Record]]) -> str:
    """What the table says of the 2 x 2 x 2, counted; and whether it says anything yet."""
    cells, pooled = figures(results), pools(results)
    shares = [f"{pooled[pool].collapsed} {pool}" for pool in list(pooled)[:4]]
    sentences = [f"Collapsed: {' and '.join(shares[:2])}; {' and '.join(shares[2:])}."]
    if not sum(found.collapses for found in cells.values()):
        sentences.append("Nothing collapsed, so this regime says nothing about what prevents a collapse.")
    fewest, most = (bound(found.seeds for found in cells.values()) for bound in (min, max))
    if fewest < most or fewest < 3:
        sentences.append(f"The cells have {fewest} to {most} seeds.")
    if fewest < 3:
        sentences.append("With fewer than 3 seeds no two single cells can be told apart.")
    return " ".join(sentences)


def section(regime: Regime, results: Path, page: Path) -> str:
    """A regime's part of the page, and its picture."""
    records = load(results / regime.name)
    picture = page.parent / page.stem / f"{regime.name}.png"
    draw(records, picture)
    seconds = sum(record["cpu_seconds"] for found in records.values() for record in found)
    parts = [
        f"## Regime {regime.name}",
        description(regime),
        *([grid(regime, results / regime.name / "scouting")] if (results / regime.name / "scouting").exists() else []),
        table(figures(records)),
        f"{counted(records)} {seconds / 60:.0f} CPU minutes.",
        f"![Curves of regime {regime.name}]({picture.relative_to(page.parent)})\n\nThick: median of the seeds; thin: every seed.",
    ]
    return "\n\n".join(parts)


def write_page(results: Path, page: Path, note: str = "") -> None:
    """Write ``page``, with a ``note``, and its pictures from ``results``; its discussion takes its figures from there too."""
    parts = [HEAD, *([note] if note else []), *(section(regime, results, page) for regime in REGIMES)]
    reading = results / "reading.md"
    if reading.exists():
        found = {regime.name: load(results / regime.name) for regime in REGIMES}
        cells = {name: figures(records) | pools(records) for name, records in found.items()}
        parts.append("## What reproduces, and what does not\n\n" + reading.read_text().format(**cells))
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n\n".join(part.strip() for part in parts) + "\n")
