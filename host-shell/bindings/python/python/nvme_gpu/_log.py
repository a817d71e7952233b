"""Events of the library for :mod:`logging`."""

from __future__ import annotations

import atexit
import os
import threading
from typing import TYPE_CHECKING

from . import _arguments, _native

if TYPE_CHECKING:
    import logging

#: How long the thread waits before it looks whether it is to end, in seconds.
_PAUSE = 0.1

_lock = threading.Lock()
_thread: _Reader | None = None


class _Reader(threading.Thread):
    """Takes events out of the library's queue: its own threads never attach to Python."""

    def __init__(self) -> None:
        super().__init__(name="nvme-gpu-log", daemon=True)
        self._process = os.getpid()
        self._is_over = threading.Event()

    def run(self) -> None:
        while True:
            event = _native.next_event(_PAUSE)
            if event is not None:
                logger().log(*event)
            elif self._is_over.is_set():
                return

    def end(self) -> None:
        # A child of a fork has no such thread.
        if self._process == os.getpid():
            self._is_over.set()
            self.join()


def logger() -> logging.Logger:
    """The logger ``nvme_gpu``."""
    # Here, since the module takes a fifth of the time of an import of this package.
    import logging

    return logging.getLogger("nvme_gpu")


def log_events(level: int | None = 30) -> None:
    """Passes the events of the library to the logger ``nvme_gpu``: bring-ups, resets, commands that were aborted or took
    long.

    ``level``: ``logging.INFO``, ``WARNING`` (30) or ``ERROR``, the least severe events to pass, or None for none, which
    is the default of a process. The level and the handlers of the logger apply, too. Events come from a thread of their
    own, a little later than what they report; of more than 1024 that wait the later ones are lost.

    Raises :class:`Usage` where another Rust library of the process receives the events.
    """
    global _thread
    if level is not None:
        level = _arguments.whole("level", level, 0, 100)
    with _lock:
        _native.queue_events(level)
        if level is None and _thread is not None:
            _thread.end()
            _thread = None
        elif level is not None and _thread is None:
            _thread = _Reader()
            _thread.start()


@atexit.register
def _end() -> None:
    # A thread that returns to Python while it ends would be stopped in the middle of native code.
    log_events(None)
