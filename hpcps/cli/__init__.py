"""The command line, one command a file. Heavy imports stand inside the commands' functions."""

from __future__ import annotations

__all__: list[str] = []
