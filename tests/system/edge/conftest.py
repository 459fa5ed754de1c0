"""The rig as a fixture, which proves after each test that nothing of it is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import census
from tests.support.daemon import missing_capability
from tests.support.timing import eventually_sync
from tests.system.edge.rig import Rig

from dsec.edge.cgroups import Hierarchies, reclaim
from dsec.edge.sweep import sweep


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """A private home; at the end its instance is dead, and everything of it must be gone after one sweep."""
    if reason := missing_capability():
        pytest.skip(reason)
    made = Rig(tmp_path / "home")
    yield made
    hierarchies = Hierarchies.discover()
    sweep(hierarchies, only=made.paths.instance, grace_s=0.0)
    reclaim(hierarchies, f"dsec-{made.paths.instance}")
    eventually_sync(
        lambda: not census.remains(instance=made.paths.instance, home=made.paths.home),
        within_s=15,
        what=f"nothing of the instance is left, but {census.remains(instance=made.paths.instance, home=made.paths.home)}",
    )
