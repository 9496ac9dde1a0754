"""Files that commands write beside the store: on a full disk, what was there stays, and no part of a file is left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from diskprefix.desk.clients import agent_profile
from diskprefix.desk.setup import service_command
from diskprefix.desk.shared import open_page
from diskprefix.errors import SettingsError
from tests.desk.conftest import disk  # noqa: F401 (a fixture)


def write_page(path: Path, text: str) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(open_page, "cache_home", lambda: path.parent)
        try:
            open_page._write_redirect(text)
        except SettingsError as error:
            raise OSError(error.message) from error


@pytest.mark.parametrize("write", [agent_profile.replace_file, service_command._replace, write_page])
@pytest.mark.parametrize("before", [None, "what was there"])
def test_a_full_disk_leaves_no_part_of_a_file(
    write: Callable[[Path, str], None],
    before: str | None,
    disk: Path,  # noqa: F811
) -> None:
    path = disk / "file"
    if before is not None:
        path.write_text(before)
    (disk / "daemons").mkdir()
    # The disk has 8 MiB.
    with pytest.raises(OSError, match=r"No space left|cannot write"):
        write(path, "x" * (9 << 20))
    left = {found.relative_to(disk).as_posix(): found.read_text() for found in disk.rglob("*") if found.is_file()}
    assert left == ({} if before is None else {"file": before})
