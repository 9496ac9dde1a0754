"""A test of conventions reads the folders that it names, or fails."""

from __future__ import annotations

import pytest

from tests.source_files import TESTS, modules_in


def test_a_folder_that_is_gone_fails_the_test_that_reads_it() -> None:
    with pytest.raises(FileNotFoundError, match=r"the modules in .*diskprefix/server"):
        modules_in("daemon/server", "server")
    with pytest.raises(FileNotFoundError, match=r"tests/server"):
        modules_in("server", below=TESTS)


def test_a_room_that_may_be_taken_out_is_read_while_it_is_there() -> None:
    assert modules_in("bridges/a_room_of_yesterday", "desk/a_room_of_yesterday") == []
    assert {path.name for path in modules_in("errors.py", "desk")} >= {"errors.py", "__init__.py"}
