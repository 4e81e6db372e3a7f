"""A server as a child process: it comes up, is watched, and leaves nothing behind."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from sorl_lightning.errors import EngineOutage
from sorl_lightning.rollout.vllm.session import processes_of, shared_memory_of

logger = logging.getLogger(__name__)
TAIL = 25  # lines of the log that a failure shows
POLL, PROGRESS, GRACE = 1.0, 15.0, 10.0  # seconds between looks, between reports, and before force


class ServerProcess:
    """Starts a server in a session of its own, and starts it again where it dies.

    The server's standard input stays open as long as this process lives: ``vllm_plugin.serve`` ends with it.

    Args:
        command: program and arguments.
        environment: whole environment of the server.
        url: where its /health answers.
        log: file that takes its output; appended to.
        restarts: times that it may die.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], url: str, log: Path, restarts: int = 0
    ) -> None:
        self.command = command
        self.environment = environment
        self.url = url
        self.log = log
        self.restarts = restarts
        self._process: subprocess.Popen[bytes] | None = None
        self._segments: set[Path] = set()
        self._lock = threading.RLock()
        self._stopped = threading.Event()

    @property
    def pid(self) -> int:
        """Process id of the server, which is its session's too."""
        assert self._process is not None
        return self._process.pid

    def start(self, timeout: float) -> None:
        """Start, and return when it is healthy; it is watched from then on.

        Raises:
            EngineOutage: it ended, or was not healthy within ``timeout`` seconds; the message has the end of its log.
        """
        atexit.register(self.stop)
        self._stopped.clear()
        start = reported = time.monotonic()
        self._launch()
        while not self.healthy():
            seconds = time.monotonic() - start
            if self._process is None or self._process.poll() is not None or seconds > timeout:
                why = "did not become healthy" if self._running() else "ended"
                self.stop()
                raise EngineOutage(
                    f"the vLLM server {why} after {seconds:.0f} s; the end of its log {self.log}:\n{self.tail()}"
                )
            if time.monotonic() - reported > PROGRESS:
                reported = time.monotonic()
                logger.info("waiting for vLLM, %.0f s so far: %s", seconds, self.tail(1))
            time.sleep(POLL / 4)
        logger.info("vLLM is up at %s after %.0f s", self.url, time.monotonic() - start)
        threading.Thread(target=self._watch, name="vllm-watch", daemon=True).start()

    def healthy(self) -> bool:
        """Whether /health answers 200."""
        return self._health() == 200

    def tail(self, lines: int = TAIL) -> str:
        """The end of the log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])

    def stop(self) -> None:
        """End the server and all that it has started: by request, then by force. Safe to call twice."""
        self._stopped.set()
        with self._lock:
            self._end()
        atexit.unregister(self.stop)

    def _launch(self) -> None:
        with self._lock, self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                env=dict(self.environment),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _health(self) -> int | None:
        """Status of /health, None without an answer."""
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def _watch(self) -> None:
        """Start the server again when it dies, as long as it may."""
        while not self._stopped.wait(POLL):
            with self._lock:
                if self._process is None or self._stopped.is_set():
                    return
                self._segments |= shared_memory_of(processes_of(self.pid))
                # 503 is an API server whose engine is dead; no answer may only be a busy one.
                if self._running() and self._health() != 503:
                    continue
                logger.error("the vLLM server has died; the end of its log %s:\n%s", self.log, self.tail())
                self._end()
                if self.restarts == 0:
                    return
                self.restarts -= 1
                self._launch()
            self._await_health()

    def _await_health(self) -> None:
        """Leave a server that has just been launched alone until it answers or ends."""
        while self._running() and not self.healthy() and not self._stopped.wait(POLL):
            pass

    def _end(self) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        members = processes_of(process.pid)
        self._segments |= shared_memory_of(members)
        if process.poll() is None:
            process.terminate()
        deadline = time.monotonic() + GRACE
        while processes_of(process.pid) and time.monotonic() < deadline:
            process.poll()
            time.sleep(0.05)
            if process.poll() is not None:
                break  # without its head the rest of the session waits for nothing
        for pid in processes_of(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()
        while processes_of(process.pid) and time.monotonic() < deadline + GRACE:
            time.sleep(0.02)
        for segment in self._segments:
            segment.unlink(missing_ok=True)
        self._segments = set()
