"""Generation while training through a real vLLM server: what a collection takes at data.max_staleness 0 and 1.

    python benchmarks/streaming_sidecar.py --seed 0 --output docs/results/streaming/sidecar0.json

One server, and the quickstart four times, at 0, 1, 1 and 0, so that a load that comes or goes meets both. It needs the
quickstart's warm start, and vLLM (``make vllm``). The first two collections of a run are left out: the engine has two
collections to play before the first update.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sorl_lightning.cli import run
from sorl_lightning.commands.demo import WARM_START
from sorl_lightning.models import Pretrained
from sorl_lightning.rollout.vllm.launch import Launch, free_port
from sorl_lightning.rollout.vllm.process import ServerProcess
from sorl_lightning.rollout.vllm.session import processes_of

ORDER = (0, 1, 1, 0)
WARM_UP = 2  # collections
FIGURES = ("rollout/success", "rollout/seconds", "rollout/wait_seconds", "rollout/staleness", "engine/push_seconds",
           "engine/probe_difference", "rollout/tokens")  # fmt: skip


def cpu_seconds(session: int) -> float:
    """CPU time of the live processes of a session."""
    ticks = 0
    for process in processes_of(session):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(server: ServerProcess, staleness: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run of the quickstart."""
    load, trainer, served = os.getloadavg()[0], time.process_time(), cpu_seconds(server.pid)
    cli = run([
        "fit", "--config", "sorl:quickstart", "--config", "sorl:engine/vllm",
        "--data.engine.init_args.urls", json.dumps([server.url]), "--data.engine.init_args.probe_every", "1",
        "--data.max_staleness", str(staleness), "--data.seed", str(options.seed),
        "--data.engine.init_args.in_flight", options.in_flight, "--trainer.limit_val_batches", "0",
        "--data.tasks_per_collection", str(options.tasks), "--trainer.max_epochs", str(options.collections), "--trainer.default_root_dir", str(folder),
        "--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false",
    ])  # fmt: skip
    assert cli.trainer.log_dir is not None
    events = EventAccumulator(str(Path(cli.trainer.log_dir) / "by_collection"))
    events.Reload()
    known = set(events.Tags()["scalars"])
    ends = [event.wall_time for event in events.Scalars("policy_version")]
    seconds = [after - before for before, after in zip(ends[:-1], ends[1:], strict=True)]
    return {
        "max_staleness": staleness,
        "seconds_a_collection": mean(seconds[WARM_UP - 1 :]),
        "seconds_of_each_after_the_first": seconds,
        "trainer_cpu_seconds": time.process_time() - trainer,
        "server_cpu_seconds": cpu_seconds(server.pid) - served,
        "load_average": [load, os.getloadavg()[0]],
        **{name: [event.value for event in events.Scalars(name)] for name in FIGURES if name in known},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("streaming_sidecar.json"))
    parser.add_argument("--collections", type=int, default=8)
    parser.add_argument("--tasks", type=int, default=16, help="of a collection, eight siblings each")
    parser.add_argument("--in_flight", default="keep")
    parser.add_argument("--python", default=".venv-vllm/bin/python", help="interpreter that has vLLM")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    policy, tokenizer = Pretrained(path=WARM_START).load()
    with tempfile.TemporaryDirectory() as folder:
        launch = Launch(
            folder=Path(folder), port=free_port(), model="policy", backend="disk", dtype="float32",
            context=policy.config.max_position_embeddings, cpu=True, python=options.python,
        )  # fmt: skip
        launch.prepare(policy, tokenizer)
        server = ServerProcess(launch.command(), launch.variables(), launch.url, Path(folder) / "log")
        server.start(timeout=600)
        try:
            runs = [measure(server, staleness, options, Path(folder) / "runs") for staleness in ORDER]
        finally:
            server.stop()
    mean_of = {s: mean(r["seconds_a_collection"] for r in runs if r["max_staleness"] == s) for s in set(ORDER)}
    result = {
        "collections": options.collections, "tasks": options.tasks, "seed": options.seed, "in_flight": options.in_flight,
        "cores": os.cpu_count(), "threads": os.environ.get("OMP_NUM_THREADS"),
        "seconds_a_collection": mean_of, "speed_over_synchronous": mean_of[0] / mean_of[1], "runs": runs,
    }  # fmt: skip
    print(json.dumps({name: value for name, value in result.items() if name != "runs"}))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
