"""A soak: train on a real text world while environments, engine and trainer are killed at random, and check the books.

    python benchmarks/soak.py --minutes 10

The parent starts fits that resume from the last checkpoint, and kills them: SIGKILL or SIGTERM at random moments, some
before Python has imported the package. Inside, environments raise, the Java process of all games is killed, the engine
is lost (the collection starts again) or fails for good (the life ends). What a checkpoint says was trained must balance
at the end: tasks drawn = trained + dropped and counted, every generated token trained once a pass, versions without a
gap, every SIGTERM obeyed, and memory, processes and file handles that do not grow.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

PASSES = 2
TASKS = 4


def fit(folder: Path, seed: int) -> None:
    """One life of the run, from the last checkpoint on."""
    import lightning as L
    import psutil
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint

    from sorl_lightning.callbacks import ClippingTriggeredNormalization, GracefulStop, stoppable
    from sorl_lightning.checkpoints import AtomicCheckpointIO
    from sorl_lightning.datamodule import RolloutDataModule
    from sorl_lightning.errors import EngineOutage, RolloutError
    from sorl_lightning.models import SmallLlama
    from sorl_lightning.module import AgentModule
    from sorl_lightning.objectives import PolicyGradient
    from sorl_lightning.rollout.engines import LocalEngine
    from sorl_lightning.rollout.environments import TextWorldExpress, jvm

    (folder / "faults.jsonl").touch()
    chance = random.Random(seed)  # never the run's own: faults must not follow from it

    def fault(kind: str, probability: float) -> bool:
        struck = chance.random() < probability
        if struck:
            with (folder / "faults.jsonl").open("a") as file:
                file.write(json.dumps({"kind": kind, "time": time.time()}) + "\n")
        return struck

    class Flaky(TextWorldExpress):
        """Raises now and then, and kills the Java process of all games."""

        def step(self, text: str) -> Any:
            if fault("environment raises", 0.004):
                raise OSError("injected")
            if jvm._running is not None and fault("java killed", 0.001):
                jvm._running.process.kill()
            return super().step(text)

    class Failing(LocalEngine):
        """Is lost now and then, and comes back with new weights; fails now and then for good."""

        async def generate(self, request: Any) -> Any:
            if fault("engine lost", 0.001):
                raise EngineOutage("injected")
            if fault("engine fails", 0.0004):
                raise RolloutError("injected")
            return await super().generate(request)

    class Books(L.Callback):
        """What was drawn, dropped and trained: kept in the checkpoint, so it is that of the surviving line."""

        def __init__(self) -> None:
            self.entries: list[dict[str, Any]] = []
            self.tokens, self.versions = 0, []

        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            self.tokens, self.versions = 0, [module.policy_version]

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            self.tokens += int(batch.generated.sum())
            self.versions.append(module.policy_version)

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            data = trainer.datamodule
            kept, process = data.collection.trajectories, psutil.Process()
            self.entries.append({
                "collection": data.collection.index,
                "drawn": len(data.tasks_of_collection(data.collection.index)),
                "trained": len({trajectory.group for trajectory in kept}),
                "failed": len(data.collection.failures), "dropped": data.collection.dropped,
                "generated_tokens": sum(trajectory.generated_tokens for trajectory in kept),
                "trained_tokens": self.tokens, "versions": list(self.versions), "skipped": module.steps.skipped,
                "pid": os.getpid(), "rss": process.memory_info().rss, "files": process.num_fds(),
                "processes": len(process.children(recursive=True)), "threads": process.num_threads(),
            })  # fmt: skip
            with (folder / "books.txt").open("a") as file:
                file.write(f"{data.collection.index}\n")

        def state_dict(self) -> dict[str, Any]:
            return {"entries": list(self.entries)}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.entries = state_dict["entries"]

    data = RolloutDataModule(
        Flaky(game="coin", parameters={"numLocations": 2}, train_tasks=50), Failing(), tasks_per_collection=TASKS,
        group_size=4, max_turns=6, max_tokens=8, mini_batches=2, passes=PASSES, micro_batches=2, retries=1, seed=1,
    )  # fmt: skip
    module = AgentModule(
        SmallLlama(tokenizer="sorl:textworld", hidden_size=32, num_hidden_layers=1), PolicyGradient(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    )  # fmt: skip
    saver = ModelCheckpoint(
        folder, "{epoch}", save_last=True, save_on_train_epoch_end=True, enable_version_counter=False
    )
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=100_000, logger=False, num_sanity_val_steps=0, limit_val_batches=0,
        enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=2, gradient_clip_val=1.0,
        callbacks=[GracefulStop(), ClippingTriggeredNormalization(), Books(), saver], plugins=[AtomicCheckpointIO()],
    )  # fmt: skip
    last = folder / "last.ckpt"
    with stoppable():  # as the command does
        (folder / f"{seed}.begun").touch()
        try:
            trainer.fit(module, datamodule=data, ckpt_path=last if last.exists() else None, weights_only=False)
        finally:
            (folder / f"{seed}.ended").touch()


def soak(minutes: float, seed: int, least: int) -> dict[str, Any]:
    """Keep a run alive for so many minutes, and at least so many faults; its books."""
    folder, chance = Path(tempfile.mkdtemp(prefix="soak")), random.Random(seed)
    end, endings, life = time.time() + 60 * minutes, Counter(), 0
    while time.time() < end or sum(faults_inside(folder).values()) + from_outside(endings) < least:
        life += 1
        number = 1000 * seed + life
        command = [sys.executable, __file__, "--fit", str(folder), "--seed", str(number)]
        with (folder / "log.txt").open("a") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        await_collections(process, folder / "books.txt", chance.choice((0, 1, 2, 4, 12)))
        try:
            endings[f"ended by itself, code {process.wait(timeout=chance.uniform(0, 3))}"] += 1
        except subprocess.TimeoutExpired:
            name = chance.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))
            endings[struck(process, name, folder / f"{number}.begun")] += 1
    return balance(folder, endings)


def struck(process: subprocess.Popen[bytes], name: signal.Signals, mark: Path) -> str:
    """Send the signal; how the process ended.

    Before the run has left its mark, and after it has failed by itself, Python itself answers, and SIGTERM ends it with
    -15 where it has not ended already.
    """
    begun = mark.exists()
    process.send_signal(name)
    try:
        code = process.wait(timeout=7200)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"{name.name} from outside, not obeyed in 2 hours"
    if code and mark.with_suffix(".ended").exists():
        return f"{name.name} from outside while Python ends"
    # Between the look and the signal it may have begun: code 0 is right then too.
    return f"{name.name} from outside{'' if begun or not code else ' while Python starts'}, code {code}"


def await_collections(process: subprocess.Popen[bytes], books: Path, count: int) -> None:
    """Until so many more collections are in the books, or the process has ended: a fair life on a slow machine too.

    Raises:
        AssertionError: it hangs.
    """
    lines = written = len(books.read_text().splitlines()) if books.exists() else 0
    last = time.time()
    while process.poll() is None and written < lines + count:
        time.sleep(0.1)
        before, written = written, len(books.read_text().splitlines()) if books.exists() else 0
        last = time.time() if written > before else last
        assert time.time() < last + 7200, "no collection in 2 hours"


def faults_inside(folder: Path) -> Counter[str]:
    """Kinds of the faults that the lives wrote down as they struck."""
    log = folder / "faults.jsonl"
    return Counter(json.loads(line)["kind"] for line in (log.read_text().splitlines() if log.exists() else []))


def from_outside(endings: Counter[str]) -> int:
    """Signals sent."""
    return sum(count for name, count in endings.items() if "outside" in name)


def balance(folder: Path, endings: Counter[str]) -> dict[str, Any]:
    """Check the books of the last checkpoint.

    Raises:
        AssertionError: they do not balance.
    """
    import torch

    saved = torch.load(folder / "last.ckpt", weights_only=False)
    entries = next(state["entries"] for state in saved["callbacks"].values() if "entries" in state)
    faults = faults_inside(folder)
    right = {f"{name.name} from outside{start}, code {code}" for name, start, code in (
        (signal.SIGKILL, "", -9), (signal.SIGKILL, " while Python starts", -9),
        (signal.SIGTERM, "", 0), (signal.SIGTERM, " while Python starts", -15),
    )}  # fmt: skip
    # An engine that fails for good, and a collection whose groups all fail, end a life with an error.
    right |= {"ended by itself, code 1", *(f"{name} from outside while Python ends" for name in ("SIGKILL", "SIGTERM"))}
    assert set(endings) <= right, endings
    assert [entry["collection"] for entry in entries] == list(range(len(entries)))
    for entry in entries:
        assert entry["drawn"] == entry["trained"] + entry["failed"] == TASKS, entry
        assert entry["trained_tokens"] == PASSES * entry["generated_tokens"], entry
        assert not entry["dropped"], entry
    versions = [version for entry in entries for version in entry["versions"]]
    assert all(later - earlier in (0, 1) for earlier, later in itertools.pairwise(versions))
    assert saved["policy_version"] == versions[-1] == 2 * PASSES * len(entries) - entries[-1]["skipped"]
    lives = [[e for e in entries if e["pid"] == pid] for pid in dict.fromkeys(e["pid"] for e in entries)]
    long = [life for life in lives if len(life) >= 8]
    assert long, "no life was long enough to see a leak: soak for more minutes"
    growth = {
        name: max(life[-1][name] - life[3][name] for life in long) for name in ("files", "processes", "threads", "rss")
    }
    assert growth["files"] <= 8, growth
    assert growth["processes"] <= 0, growth
    assert growth["rss"] < 200 * 2**20, growth
    return {
        "collections": len(entries), "tasks drawn": TASKS * len(entries),
        "groups trained": sum(e["trained"] for e in entries),
        "groups failed and counted": sum(e["failed"] for e in entries),
        "tokens generated": sum(e["generated_tokens"] for e in entries),
        "tokens trained": sum(e["trained_tokens"] for e in entries), "policy version": saved["policy_version"],
        "lives": sum(endings.values()), **{f"lives that ended: {name}": n for name, n in sorted(endings.items())},
        **{f"faults inside: {name}": n for name, n in sorted(faults.items())},
        "faults": sum(faults.values()) + from_outside(endings),
        "lives of 8 collections or more": len(long), "collections of the longest": max(map(len, long)),
        "growth in a life, files": growth["files"], "growth in a life, processes": growth["processes"],
        "growth in a life, MiB": round(growth["rss"] / 2**20),
    }  # fmt: skip


def main() -> None:
    """Soak, print the table, and keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--faults", type=int, default=20, help="go on until so many have struck")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=None, help="folder for the table as JSON")
    parser.add_argument("--fit", type=Path, default=None, help="internal: live one life in this folder")
    arguments = parser.parse_args()
    if arguments.fit is not None:
        fit(arguments.fit, arguments.seed)
        return
    table = {
        "minutes": arguments.minutes,
        "seed": arguments.seed,
        **soak(arguments.minutes, arguments.seed, arguments.faults),
    }
    for name, value in table.items():
        print(f"| {name} | {value} |")
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / f"seed_{arguments.seed}.json").write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
