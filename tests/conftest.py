"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """The pool of started ranks: `ranks.run(function, *args, world_size=8)` gives one result per rank."""
    pool = Ranks(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()
