"""Reports: the events of a run turned into numbers, a table and figures.

This room reads event files and nothing else. It measures nothing, decides nothing and never prints:
what it makes is returned, or written where the caller says.
"""

from __future__ import annotations

__all__: list[str] = []
