"""Set up what tests of transfers share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from both_ends import Servers
from waiting import wait_until

from sglang_ext.disaggregation.codec import BUFFERS


@pytest.fixture
def servers() -> Iterator[Servers]:
    both = Servers()
    yield both
    for pages in both.pages:  # whatever has happened
        wait_until(lambda pages=pages: pages._free.qsize() == BUFFERS, 5)  # type: ignore[misc]
