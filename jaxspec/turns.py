"""Who may use an engine now: one thread at a time, and no Ctrl-C in the middle of its turn."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


class DeferredInterrupt:
    """Holds Ctrl-C (SIGINT) back while a `with` block runs, and hands it to its handler at the end of the block.

    A second Ctrl-C within the block is not held back: the block may hang. Only the main thread gets signals; in other
    threads, and where SIGINT is ignored or left to the system, this does nothing. Blocks may be nested.
    """

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._is_noted = False

    def __enter__(self) -> "DeferredInterrupt":
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if self._handler is None:
            return
        signal.signal(signal.SIGINT, self._handler)
        if self._is_noted:
            self._handler(signal.SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._is_noted and self._handler is not None:
            self._handler(number, frame)
        self._is_noted = True


class Turns:
    """Gives turns to threads: a lock whose holder is not interrupted by Ctrl-C."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None

    @contextlib.contextmanager
    def take(self, *, wait: bool = True) -> Iterator[bool]:
        """Holds the turn for the block; True when it has it.

        Args:
            wait: wait until the turn is free; without it, yields False where it is not.

        Raises:
            RuntimeError: this thread waits for a turn while it holds it, which would last for ever.
        """
        me = threading.get_ident()
        if wait and self._holder == me:
            raise RuntimeError("this LLM is called from within one of its own steps (by a signal handler?).")
        with DeferredInterrupt():
            if not self._lock.acquire(blocking=wait):
                yield False
                return
            try:
                self._holder = me
                yield True
            finally:
                self._holder = None
                self._lock.release()
