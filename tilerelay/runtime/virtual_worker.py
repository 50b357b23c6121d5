"""A virtual device's process: builds the programs that it is sent and calls their methods, one message at a time.

Messages to the process are (what, key, pickled rest). "make", with a class and arguments, is followed by a file
descriptor, which becomes the program's first argument; "call" comes with a method's name and arguments; "drop" forgets
a program. Each is answered by (True, result) or (False, traceback). The process ends with its parent.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import threading
import traceback
import types
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

ORPHAN_CHECK_MS = 500


def main(fd: int, parent: int) -> None:
    """Serve the parent process over the socket `fd` until it closes its end."""
    connection = Connection(fd)
    threading.Thread(target=_end_with_parent, args=(fd, parent), daemon=True).start()
    try:
        import tilerelay.runtime.virtual_program  # noqa: F401  the slow imports, before the first message

        _hasten_interpreter()
        connection.send((True, None))
    except Exception:
        connection.send((False, traceback.format_exc()))
        return
    programs: dict[int, Any] = {}
    try:
        while True:
            what, key, rest = connection.recv()
            memory = recv_handle(connection) if what == "make" else None
            try:
                reply = True, _serve(programs, memory, what, key, rest)
            except Exception:
                reply = False, traceback.format_exc()
            finally:
                if memory is not None:
                    os.close(memory)
            connection.send(reply)
    except (EOFError, ConnectionError):
        return


def _serve(programs: dict[int, Any], memory: int | None, what: str, key: int, rest: bytes) -> Any:
    if what == "drop":
        programs.pop(key, None)
        gc.collect()  # the interpreter leaves every launch's arguments in a cycle of references
        return None
    name, arguments = pickle.loads(rest)
    if what == "make":
        programs[key] = name(memory, *arguments)
        return None
    return getattr(programs[key], name)(*arguments)


def _end_with_parent(fd: int, parent: int) -> None:
    """End this process, whatever it is doing, when the parent closes its end of the socket or dies.

    A hang-up alone would not do: children that the parent forked hold copies of its end.
    """
    poll = select.poll()
    poll.register(fd, 0)  # only a hang-up
    while os.getppid() == parent and not poll.poll(ORPHAN_CHECK_MS):
        pass
    os._exit(1)


def _hasten_interpreter() -> None:
    """Leave out what costs Triton's interpreter most of its time and does nothing here.

    It looks through all of triton.language at every device function call and puts its own functions there, since the
    same process may also compile. This process never compiles: once is enough. And it computes every integer operation
    once more in 64 bits to find overflows that it reports in debug mode only.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda _: interpreter._LangPatchScope()  # nothing to take back
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
