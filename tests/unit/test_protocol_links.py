"""When links are told of: once they are known, and when a rate is another one."""

from __future__ import annotations

import pytest

from hpcps.errors import ProtocolError
from hpcps.protocol.links import Links


def test_links_are_told_when_they_are_others() -> None:
    events: list[tuple[str, dict[str, object]]] = []
    links = Links(report=lambda name, fields: events.append((name, fields)))
    links.take(3, [])
    links.take(3, [0.0, 0.0, 0.0, 0.0])
    assert events == [], "nothing is known"
    links.take(3, [0.001, 1e9, 0.0, 0.0, 0.002, 1e8, 0.003, 2e8])
    assert events == [
        (
            "links",
            {
                "worker": 3,
                "push_latency_s": [0.001, 0.002],
                "push_bytes_per_s": [1e9, 1e8],
                "pull_latency_s": [0.0, 0.003],
                "pull_bytes_per_s": [0.0, 2e8],
            },
        )
    ]
    links.take(3, [0.005, 0.8e9, 0.0, 0.0, 0.002, 1.3e8, 0.003, 2e8])
    links.take(3, [0.001, 0.0, 0.0, 0.0, 0.002, 0.0, 0.003, 0.0])
    assert len(events) == 1, "no rate is half as large again, or unknown"
    links.take(3, [])
    links.take(3, [0.001, 0.6e9, 0.0, 0.0, 0.002, 1e8, 0.003, 2e8])
    links.take(4, [0.001, 1e9, 0.0, 0.0])
    assert [fields["worker"] for _, fields in events] == [3, 3, 4]


def test_four_numbers_a_server() -> None:
    with pytest.raises(ProtocolError, match="cannot take in the links of rank 3: got 5 numbers, need 4 a server"):
        Links(report=lambda name, fields: None).take(3, [0.0] * 5)
