"""The files of this room on a full disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from diskprefix.desk.setup import service_command
from tests.desk.full_disk import assert_whole_on_a_full_disk


@pytest.mark.parametrize("before", [None, "what was there"])
def test_a_full_disk_leaves_no_part_of_a_file(before: str | None, disk: Path) -> None:
    assert_whole_on_a_full_disk(service_command._replace, before, disk)
