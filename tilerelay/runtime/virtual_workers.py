"""The processes of virtual devices, as their parent sees them: start, ask, wait with a deadline, end."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing import connection, reduction
from multiprocessing.connection import Connection
from typing import Any

from tilerelay.errors import TilerelayError

START_TIMEOUT_S = 120.0  # importing torch and Triton takes seconds, more on a loaded machine
TALK_TIMEOUT_S = 30.0  # for a message to be taken, or to arrive whole
END_TIMEOUT_S = 5.0

ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    # One thread each: the processes are the parallelism, and every product is then summed in the same order.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # NumPy warns of infinities and NaN, on which a GPU is silent, and of ways in which the interpreter calls it.
    "PYTHONWARNINGS": "ignore",
}


@dataclass(frozen=True)
class Reply:
    """A worker's answer: a value, or why there is none (`error`, the traceback or how the process ended)."""

    worker: int
    value: Any = None
    error: str | None = None


class Workers:
    """Fresh Python processes in which Triton kernels are interpreted; see `virtual_worker` for what they do.

    They are started together, and are ready when the constructor returns. Several pipelines may use the same workers,
    one run at a time. They end with `close`, with this object, or with this process.

    Raises:
        TilerelayError: a worker did not start.
    """

    def __init__(self, count: int) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection | None] = []
        self._finalizer = weakref.finalize(self, _end, self._processes, self._connections)
        self._next_key = 0
        try:
            for _ in range(count):
                self._start()
            self.gather(range(count), START_TIMEOUT_S, "start")
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._processes)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(TALK_TIMEOUT_S), 0))
            # The path of this process, so that the worker finds what this process found, however it was started.
            code = (
                f"import sys; sys.path[:] = {[str(p) for p in sys.path]!r}; "
                f"from tilerelay.runtime.virtual_worker import main; main({theirs.fileno()}, {os.getpid()})"
            )
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                env={**os.environ, **ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the parent, which then ends its workers
            )
            self._processes.append(process)
            self._connections.append(Connection(ours.detach()))

    def make(self, program: type, arguments: list[tuple[Any, ...]], fd: int) -> int:
        """Build `program(fd, *arguments[i])` in worker i; returns the key under which to call it.

        Raises:
            TilerelayError: a worker could not.
        """
        key = self._next_key
        self._next_key += 1
        for worker, own in enumerate(arguments):
            self._send(worker, ("make", key, pickle.dumps((program, own))), fd)
        try:
            self.gather(range(len(arguments)), START_TIMEOUT_S, "make its program")
        except TilerelayError:
            self.drop(key, len(arguments))
            raise
        return key

    def call(self, worker: int, key: int, method: str, *arguments: Any) -> None:
        """Ask a worker to call its program's method; the answer comes from `wait`. A dead worker answers there too."""
        self._send(worker, ("call", key, pickle.dumps((method, arguments))))

    def drop(self, key: int, users: int) -> None:
        """Free what the first `users` workers hold under a key."""
        for worker in range(users):
            self._send(worker, ("drop", key, b""))
        self.gather([i for i in range(users) if self._connections[i]], END_TIMEOUT_S, "drop its program")

    def _send(self, worker: int, message: tuple[str, int, bytes], fd: int | None = None) -> None:
        link = self._connections[worker]
        if link is None:
            return
        try:
            link.send(message)
            if fd is not None:
                reduction.send_handle(link, fd, self._processes[worker].pid)
        except ConnectionError:
            pass  # it has ended: `wait` reads the end of file
        except BlockingIOError:
            self.kill(worker)

    def wait(self, workers: Iterable[int], timeout_s: float) -> list[Reply]:
        """Answers of these workers that come within the time, at least one unless the time is over."""
        links, replies = {}, []
        for worker in workers:
            link = self._connections[worker]
            if link is None:
                replies.append(Reply(worker, error="the process has ended"))
            else:
                links[link] = worker
        for ready in connection.wait(list(links), 0.0 if replies else timeout_s):
            assert isinstance(ready, Connection)
            worker = links[ready]
            try:
                good, value = ready.recv()
                replies.append(Reply(worker, value) if good else Reply(worker, error=value))
            except (EOFError, ConnectionError):
                replies.append(Reply(worker, error=self._bury(worker)))
            except BlockingIOError:
                self.kill(worker)
                replies.append(Reply(worker, error="the process stopped in the middle of its answer"))
        return replies

    def gather(self, workers: Iterable[int], timeout_s: float, what: str) -> dict[int, Any]:
        """One answer of each of these workers.

        Raises:
            TilerelayError: one failed, or the time is over; the late ones are ended.
        """
        waiting, values, deadline = set(workers), {}, time.monotonic() + timeout_s
        errors: list[str] = []
        while waiting:
            replies = self.wait(waiting, max(0.0, deadline - time.monotonic()))
            if not replies:
                for worker in waiting:
                    self.kill(worker)
                errors += [f"virtual device {worker} did not {what} within {timeout_s:g} s" for worker in waiting]
                break
            for reply in replies:
                waiting.discard(reply.worker)
                values[reply.worker] = reply.value
                if reply.error:
                    errors.append(f"virtual device {reply.worker} failed to {what}: {reply.error}")
        if errors:
            raise TilerelayError("\n".join(errors))
        return values

    def alive(self, worker: int) -> bool:
        return self._connections[worker] is not None

    def kill(self, worker: int) -> None:
        """End one worker now, for good."""
        self._processes[worker].kill()
        self._bury(worker)

    def _bury(self, worker: int) -> str:
        """Reap a worker that is ending; says how it ended."""
        link, self._connections[worker] = self._connections[worker], None
        if link is not None:
            link.close()
        process = self._processes[worker]
        try:
            code = process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # it hung up, but does not end
            process.kill()
            code = process.wait()
        return f"the process was ended by signal {-code}" if code < 0 else f"the process ended with exit code {code}"

    def close(self) -> None:
        """End all workers at once, whatever they are doing. Closing twice is allowed."""
        self._finalizer()


def _end(processes: list[subprocess.Popen[bytes]], connections: list[Connection | None]) -> None:
    for index, link in enumerate(connections):
        if link is not None:
            link.close()
            connections[index] = None
    for process in processes:
        process.kill()  # it has nothing to put away
    for process in processes:
        process.wait()
