"""The communication thread: the only one of a rank that calls MPI.

Work comes as operations: generators that do a piece, yield while they wait, and say by the value they
yield whether they got on. The thread gives each a turn, lets the transport look for news, tests one
request that never completes (which is what makes one-sided traffic move on every MPI), and sleeps
longer and longer while nothing happens.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Generator
from typing import TypeAlias

from hpcps.comm.backoff import Backoff

__all__ = ["Actor", "Operation"]

Operation: TypeAlias = Generator[bool, None, None]
"""Yields True after progress, False while it waits."""


class Actor:
    """Runs operations on a thread of its own.

    Args:
        name: of the thread, for stack dumps.
        look: called every round: take in news, return True if there was any.
        longest_sleep_s: of a working rank.
        on_error: called once with what an operation or a look raised; the thread then ends.
    """

    def __init__(
        self,
        name: str,
        look: Callable[[], bool],
        *,
        longest_sleep_s: float,
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._look = look
        self._on_error = on_error
        self._backoff = Backoff(longest_sleep_s)
        self._queue: queue.SimpleQueue[Operation] = queue.SimpleQueue()
        self._bell = threading.Lock()
        """Held; ``wake`` lets it go, and the thread that sleeps takes it again. An Event costs three times as much."""
        self._bell.acquire()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def submit(self, operation: Operation) -> None:
        """Queue an operation; operations take their first turn in the order of submission."""
        self._queue.put(operation)
        self.wake()

    def wake(self) -> None:
        """There is news that ``look`` will find."""
        with contextlib.suppress(RuntimeError):  # nobody slept since the last call
            self._bell.release()

    def stop(self, timeout_s: float) -> bool:
        """End after the running operations; returns False if the thread hangs."""
        self._stopping = True
        self.wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        active: list[Operation] = []
        try:
            while not self._stopping or active:
                progressed = self._take_new(active)
                remaining: list[Operation] = []
                for operation in active:
                    try:
                        progressed |= next(operation)
                        remaining.append(operation)
                    except StopIteration:
                        progressed = True
                active = remaining
                progressed |= self._look()
                sleep_s = self._backoff.next_s(progressed=progressed, under_way=bool(active))
                if sleep_s > 0:
                    self._bell.acquire(timeout=sleep_s)
        except BaseException as error:  # whatever it is, the rank's main thread must hear of it
            self._on_error(error)

    def _take_new(self, active: list[Operation]) -> bool:
        progressed = False
        while not self._queue.empty():
            active.append(self._queue.get())
            progressed = True
        return progressed
