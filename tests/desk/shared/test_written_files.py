"""The files of this room on a full disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from diskprefix.desk.shared import open_page
from diskprefix.errors import SettingsError
from tests.desk.full_disk import assert_whole_on_a_full_disk


def write_page(path: Path, text: str) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(open_page, "cache_home", lambda: path.parent)
        try:
            open_page._write_redirect(text)
        except SettingsError as error:
            raise OSError(error.message) from error


@pytest.mark.parametrize("before", [None, "what was there"])
def test_a_full_disk_leaves_no_part_of_a_file(before: str | None, disk: Path) -> None:
    assert_whole_on_a_full_disk(write_page, before, disk)
