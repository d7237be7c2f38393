"""Receives that stand ready all the time. Communication thread only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpi4py import MPI

__all__ = ["Ring", "Standing"]


class Standing:
    """Receives that stand ready; when all have come, ``done`` is called, and they are posted again if it says so.

    Args:
        post: starts the receives.
        done: takes in what came; True to post again at once.
    """

    def __init__(self, post: Callable[[], list[MPI.Request]], done: Callable[[list[MPI.Status]], bool]) -> None:
        self._post = post
        self._done = done
        self._requests: list[MPI.Request] = []
        self.post()

    def post(self) -> None:
        """Start the receives."""
        self._requests = self._post()

    def look(self) -> bool:
        """True if something came."""
        if not self._requests:
            return False
        statuses = [MPI.Status() for _ in self._requests]
        if not MPI.Request.Testall(self._requests, statuses):
            return False
        self._requests = []
        if self._done(statuses):
            self.post()
        return True

    def cancel(self) -> None:
        """Take the receives back."""
        for request in self._requests:
            request.Cancel()
            request.Wait()


class Ring:
    """Receives of one sender and tag: MPI fills them in the order of posting, and they are looked at in that order.

    Args:
        receives: in the order of posting; each is posted again as it is done.
    """

    def __init__(self, receives: Sequence[Standing]) -> None:
        self._receives = receives
        self._next = 0

    def look(self) -> bool:
        """True if something came; takes in at most one round."""
        for count in range(len(self._receives)):
            if not self._receives[self._next].look():
                return count > 0
            self._next = (self._next + 1) % len(self._receives)
        return True

    def cancel(self) -> None:
        """Take the receives back."""
        for receive in self._receives:
            receive.cancel()
