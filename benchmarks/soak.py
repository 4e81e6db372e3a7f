"""A soak: train on a real text world while environments, engine and trainer are killed at random, and check the books.

    python benchmarks/soak.py --minutes 10

The parent starts fits that resume from the last checkpoint, and kills them: SIGKILL or SIGTERM at random moments.
Inside, environments raise, the Java process of all games is killed, and the engine fails. What a checkpoint says was
trained must balance at the end: tasks drawn = trained + dropped and counted, every generated token trained once a
pass, versions without a gap, and memory, processes and file handles that do not grow.
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

    from sorl_lightning.callbacks import ClippingTriggeredNormalization, GracefulStop
    from sorl_lightning.checkpoints import AtomicCheckpointIO
    from sorl_lightning.datamodule import RolloutDataModule
    from sorl_lightning.errors import RolloutError
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
            if fault("environment raises", 0.002):
                raise OSError("injected")
            if jvm._running is not None and fault("java killed", 0.0004):
                jvm._running.process.kill()
            return super().step(text)

    class Failing(LocalEngine):
        """Fails now and then, as an engine that is gone."""

        async def generate(self, request: Any) -> Any:
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
    trainer.fit(module, datamodule=data, ckpt_path=last if last.exists() else None, weights_only=False)


def soak(minutes: float, seed: int) -> dict[str, Any]:
    """Keep a run alive for so many minutes against all faults; its books."""
    folder, chance = Path(tempfile.mkdtemp(prefix="soak")), random.Random(seed)
    end, endings, life = time.time() + 60 * minutes, Counter(), 0
    while time.time() < end:
        life += 1
        command = [sys.executable, __file__, "--fit", str(folder), "--seed", str(1000 * seed + life)]
        with (folder / "log.txt").open("a") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        await_collections(process, folder / "books.txt", chance.randrange(6))
        try:
            endings[f"ended by itself with code {process.wait(timeout=chance.uniform(0, 3))}"] += 1
        except subprocess.TimeoutExpired:
            name = chance.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))
            process.send_signal(name)
            try:
                endings[f"{name.name} from outside, code {process.wait(timeout=60)}"] += 1
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                endings[f"{name.name} from outside, not obeyed in 60 seconds"] += 1
    return balance(folder, endings)


def await_collections(process: subprocess.Popen[bytes], books: Path, count: int) -> None:
    """Until so many more collections are in the books, or the process has ended: a fair life on a slow machine too."""
    lines = len(books.read_text().splitlines()) if books.exists() else 0
    while process.poll() is None and (len(books.read_text().splitlines()) if books.exists() else 0) < lines + count:
        time.sleep(0.1)


def balance(folder: Path, endings: Counter[str]) -> dict[str, Any]:
    """Check the books of the last checkpoint.

    Raises:
        AssertionError: they do not balance.
    """
    import torch

    saved = torch.load(folder / "last.ckpt", weights_only=False)
    entries = next(state["entries"] for state in saved["callbacks"].values() if "entries" in state)
    log = folder / "faults.jsonl"
    faults = Counter(json.loads(line)["kind"] for line in log.read_text().splitlines() if line)
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
    growth = {
        name: max((life[-1][name] - life[3][name] for life in long), default=0)
        for name in ("files", "processes", "threads", "rss")
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
        "lives": sum(endings.values()), "endings": dict(endings), "faults inside": dict(faults),
        "faults": sum(faults.values()) + sum(n for name, n in endings.items() if "outside" in name),
        "growth in a life, files": growth["files"], "growth in a life, processes": growth["processes"],
        "growth in a life, MiB": round(growth["rss"] / 2**20),
    }  # fmt: skip


def main() -> None:
    """Soak, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fit", type=Path, default=None, help="internal: live one life in this folder")
    arguments = parser.parse_args()
    if arguments.fit is not None:
        fit(arguments.fit, arguments.seed)
        return
    for name, value in soak(arguments.minutes, arguments.seed).items():
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
