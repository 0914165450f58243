"""How a rank ends: what it tells the others, and how it ends a wait that would never end."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType

import torch.distributed as dist

from ..errors import RunError

log = logging.getLogger("autopar_torch")
STATUS = 6  # of a rank that gives up
FDS = "/proc/self/fd"

_lines: dict[int, str] = {}  # connections of the process groups: descriptor -> what it is


# --- ending a wait --------------------------------------------------------------------------------


@contextlib.contextmanager
def opening() -> Iterator[None]:
    """Remember the connections that a new process group makes. Gloo waits for its peers in C++ and
    has no call that ends a wait (`abort` does nothing), but it notices a connection that ends."""
    before = _sockets()
    yield
    _lines.update({fd: what for fd, what in _sockets().items() if before.get(fd) != what})


def _sockets() -> dict[int, str]:
    found = {}
    for name in os.listdir(FDS) if os.path.isdir(FDS) else ():
        with contextlib.suppress(OSError):  # it was closed in the meantime
            what = os.readlink(f"{FDS}/{name}")
            if what.startswith("socket:"):
                found[int(name)] = what
    return found


def cut() -> None:
    """Wake every thread that waits for a peer: its wait ends with an error."""
    if dist.is_initialized() and "nccl" in dist.get_backend_config():
        dist.distributed_c10d._abort_process_group()
    now = _sockets()
    for fd, what in _lines.items():
        if now.get(fd) == what:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as line:
                if not line.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    line.shutdown(socket.SHUT_RDWR)


def interrupt(thread: int, error: RunError) -> None:
    """Raise it in a thread as soon as that is back in Python: a wait for NCCL that is cut ends
    without an error."""
    kind = type("RunError", (RunError,), {"__init__": lambda own: RunError.__init__(
        own, error.what, where=error.where, fix=error.fix)})
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


def show_stacks() -> None:
    """Print where every thread of this rank is."""
    with contextlib.suppress(ValueError, OSError, AttributeError):  # there may be no stderr
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)


def give_up(status: int = STATUS) -> None:
    """End this process at once, whatever its main thread waits for."""
    for handler in (*log.handlers, *logging.getLogger().handlers):
        handler.flush()
    os._exit(status)


# --- leaving word ---------------------------------------------------------------------------------


class Word:
    """Has this rank say how it ended, by an exception or the end of its script; notices SIGTERM."""

    def __init__(self, ended: Callable[[str], None], told: Callable[[BaseException], None]) -> None:
        self.ended, self.told, self.pid = ended, told, os.getpid()
        self.hook, sys.excepthook = sys.excepthook, self._failed
        atexit.register(self._finished)
        self.pipe = os.pipe()
        os.set_blocking(self.pipe[1], False)
        self._listen()
        os.register_at_fork(before=self._hold, after_in_parent=self._release,
                            after_in_child=self._forget)

    def _failed(self, kind: type[BaseException], error: BaseException,
                trace: TracebackType | None) -> None:
        if os.getpid() == self.pid:
            self.told(error)
            _record(error.with_traceback(trace))
        self.hook(kind, error, trace)

    def _finished(self) -> None:
        if os.getpid() == self.pid:
            self.ended("")
            _ignore()

    # torchrun ends the others 0.1 s after a rank died. A main thread that computes would notice
    # neither in time; the pipe wakes the watching thread in any case.

    def _listen(self) -> None:
        """Have Python write a byte to the pipe as soon as a signal comes, if no handler is set."""
        mine = threading.current_thread() is threading.main_thread()
        if mine and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            other = signal.set_wakeup_fd(self.pipe[1], warn_on_full_buffer=False)
            if other == -1:
                signal.signal(signal.SIGTERM, _noticed)
            else:
                signal.set_wakeup_fd(other)

    def comes(self, within_s: float) -> bool:
        """Wait; whether this rank was told to end, by a SIGTERM that no other handler takes."""
        ready = select.select([self.pipe[0]], [], [], within_s)[0]
        return bool(ready) and signal.SIGTERM in os.read(self.pipe[0], 64) and _is_ours()

    # A child of this process is no rank: its signals are its own from the first moment, though it
    # begins with this pipe and handler.

    def _hold(self) -> None:
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _release(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)

    def _forget(self) -> None:
        _ignore()
        self._release()

    def wake(self) -> None:
        """End the wait of the thread that is in `comes`."""
        os.write(self.pipe[1], b"\0")


def _noticed(*_: object) -> None:
    """A handler, so that the pipe gets its byte; the thread that reads it ends this rank."""


def _is_ours() -> bool:
    return signal.getsignal(signal.SIGTERM) is _noticed


def _ignore() -> None:
    if _is_ours():
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _record(error: BaseException) -> None:
    """The file from which torchrun's summary takes a traceback."""
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        try:
            raise error
        except BaseException:  # it writes down what is being handled
            get_error_handler().record_exception(error)
