"""``python -m hpcps``: the same as the ``hpcps`` command."""

from __future__ import annotations

import sys

from hpcps.cli.main import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
