"""What the tests measure is the run's own; what they fetch is shared with later runs."""

from __future__ import annotations

import subprocess
import sys

from diskprefix.settings import cache_home
from tests.cache_folder import RUNS, USERS
from tests.server.daemon_process import clean_environment


def test_this_process_and_those_it_starts_use_the_cache_folder_of_the_run_and_share_what_was_fetched() -> None:
    code = "from diskprefix.settings import cache_home; print(cache_home())"
    started = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=clean_environment()
    )
    assert started.stdout.strip() == str(cache_home()) == str(RUNS / "diskprefix")
    assert not RUNS.is_relative_to(USERS)
    assert (cache_home() / "test-tokenizers").samefile(USERS / "diskprefix/test-tokenizers")
