"""What tests of codecs share: one body over the numpy reference and the built module."""

from __future__ import annotations

import pytest
from codec_cases import IMPLEMENTATIONS


@pytest.fixture(params=IMPLEMENTATIONS)
def codecs(request):
    """The codecs, once of each implementation."""
    return request.param
