from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.daemon.server.daemon_process import DaemonProcess
from tests.daemon.server.scripted import AppServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's chromium. Modules that use it need the program."""
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def client(daemon: DaemonProcess | AppServer) -> Iterator[httpx.Client]:
    with daemon.client() as client:
        yield client
