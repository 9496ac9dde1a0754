"""A cache folder for this run of the tests, in place of the user's: what one run measured decides no other run.

What was fetched stays in the user's folder, and is shared. Import this before anything that reads XDG_CACHE_HOME. The
processes of a run, and those that tests start, inherit the folder.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

_USERS = "DISKPREFIX_TEST_USERS_CACHE"
"""The variable with the user's cache folder. Where it is set, another process has made this run's folder."""
_IS_MADE_HERE = _USERS not in os.environ

if _IS_MADE_HERE:
    os.environ[_USERS] = os.environ.get("XDG_CACHE_HOME", "").strip() or str(Path.home() / ".cache")
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="diskprefix-tests-")

RUNS, USERS = Path(os.environ["XDG_CACHE_HOME"]), Path(os.environ[_USERS])

if _IS_MADE_HERE:
    os.environ.setdefault("PIP_CACHE_DIR", str(USERS / "pip"))
    tokenizers = USERS / "diskprefix/test-tokenizers"
    tokenizers.mkdir(parents=True, exist_ok=True)
    (RUNS / "diskprefix").mkdir()
    (RUNS / "diskprefix/test-tokenizers").symlink_to(tokenizers)


def remove() -> None:
    """Removes this run's folder, in the process that made it."""
    if _IS_MADE_HERE:
        shutil.rmtree(RUNS, ignore_errors=True)
