"""Launch room: which launcher started us, which one to start, and with what flags. Needs the standard library only."""

from __future__ import annotations

__all__: list[str] = []
