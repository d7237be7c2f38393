"""The coordinator's runtime: hands messages to the state machine, sends its replies, logs its decisions,
and prints the one progress line of a job. Runs on the first server.
"""

from __future__ import annotations

import logging
import sys
import time

from hpcps.comm.channel import Channel
from hpcps.config import RunConfig
from hpcps.errors import ProtocolError
from hpcps.plan import Roles
from hpcps.protocol.control import BarrierEnter, ControlMessage, LoaderOpen, OrderRequest, encode_control
from hpcps.protocol.coordinator import Coordinator
from hpcps.runtime.metrics import EventLog
from hpcps.units import format_seconds

__all__ = ["Coordination"]

logger = logging.getLogger(__name__)


class Coordination:
    """The coordinator of a job.

    Args:
        channel: the first server's channel.
        config: the run's settings.
        roles: who serves and who works.
        events: where events go.
    """

    def __init__(self, channel: Channel, config: RunConfig, *, roles: Roles, events: EventLog) -> None:
        self._channel = channel
        self._config = config
        self._events = events
        self._coordinator = Coordinator(config, roles.workers, report=self._report)
        self._shown_s = time.monotonic()
        self._shown_samples = 0

    def on_message(self, message: ControlMessage) -> None:
        """A worker's message for the coordinator."""
        if isinstance(message, OrderRequest):
            replies = self._coordinator.on_request(message)
        elif isinstance(message, LoaderOpen):
            self._coordinator.on_loader(message)
            return
        elif isinstance(message, BarrierEnter):
            replies = self._coordinator.on_barrier(message)
        else:
            raise ProtocolError(
                f"cannot accept {type(message).__name__} on a server; run the same hpcps on every rank",
                rank=self._channel.rank,
            )
        for rank, reply in replies:
            self._channel.send(rank, encode_control(reply))

    def idle(self) -> float:
        """Show progress if it is due; returns the seconds to the next time."""
        now_s = time.monotonic()
        left_s = self._shown_s + self._config.log.progress_s - now_s
        if left_s <= 0:
            self._show(now_s - self._shown_s)
            self._shown_s = now_s
            left_s = self._config.log.progress_s
        return left_s

    def _report(self, event: str, fields: dict[str, object]) -> None:
        self._events.write(event, **fields)
        level = logging.DEBUG if event == "capacity" else logging.INFO
        logger.log(level, "%s: %s", event, ", ".join(f"{name} {value}" for name, value in fields.items()))

    def _show(self, seconds: float) -> None:
        progress = self._coordinator.progress
        done = progress.num_samples - self._shown_samples
        self._shown_samples = progress.num_samples
        if done <= 0:
            return
        rate = done / seconds
        total = f"/{progress.num_epochs}" if progress.num_epochs else ""
        parts = [f"epoch {progress.epoch + 1}{total}", f"{rate:,.0f} samples/s"]
        for name, weight in progress.weights.items():
            if weight > 0:
                parts.append(f"{name} {progress.sums[name] / weight:.4f}")
                progress.sums[name], progress.weights[name] = 0.0, 0.0
        left = progress.num_epochs * progress.epoch_total - progress.num_samples
        if progress.num_epochs and left > 0:
            parts.append(f"ETA {format_seconds(left / rate)}")
        if progress.ideal_samples_per_s > 0:
            reached = rate / progress.ideal_samples_per_s
            holds = f"rank {progress.slowest} is slowest" if reached > 0.9 else "communication or warm-up holds back"
            parts.append(f"{reached:.0%} of the possible speed (S* {progress.s_star:.2f}), {holds}")
        sys.stderr.write("hpcps: " + ", ".join(parts) + "\n")
        sys.stderr.flush()
