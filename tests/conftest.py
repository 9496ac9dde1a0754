"""What all tests share: the order they run in, a tiny chat model on disk, and a daemon that serves it."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from diskprefix.daemon.engine.idle import cpu_waits
from diskprefix.native import library
from tests import cache_folder, cases, reach, repeatable  # noqa: F401 (the profile of examples)
from tests.closing import ClosingLines
from tests.daemon.server.chat_model import write_chat_model
from tests.daemon.server.daemon_process import DaemonProcess, serve_flags
from tests.faults.seeds import seed_of_run

# Who starts the tests in the background may have interrupts ignored; what the tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The number of threads is part of a store's identity: a daemon that a test starts must find what the test saved. With
# one, the processes of the tests do not wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

# Each client would read the certificates of all authorities, for a server on this machine.
for _name in ("httpx", "httpx2"):
    if find_spec(_name):
        _default = import_module(f"{_name}._transports.default")
        _default.create_ssl_context = cache(_default.create_ssl_context)  # type: ignore[attr-defined]

# Tests that run beside each other want the same CPUs, and what they compute ahead must not wait for that.
cpu_waits._LONG = 1.0


pytest_addoption = cases.pytest_addoption


def pytest_configure(config: pytest.Config) -> None:
    """The process that prints the results says more at its end. With two processes it is neither of them."""
    if not hasattr(config, "workerinput"):
        cases.take_seed(config)
        reach.take_start(config)
        config.pluginmanager.register(ClosingLines())
        config.add_cleanup(cache_folder.remove)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts the files with slow tests first, so that no process is left alone with one at the end."""
    if config.option.since:
        reach.keep_reached(config, items)
        return
    cases.mark_as_slow(items, seed_of_run())
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    reach.skip_unfit(item.config)


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector need not look at it again and again."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Collects what the tests left, so that the two collections of pytest, which look for errors, find little."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def log_as_it_was() -> None:
    """A command that another test ran in this process has set the level of the log, and writes it to a stream that is
    closed."""
    logging.getLogger("diskprefix").setLevel(logging.NOTSET)
    root = logging.getLogger()
    for handler in [one for one in root.handlers if type(one) is logging.StreamHandler]:
        root.removeHandler(handler)


@pytest.fixture(autouse=True)
def kernels_as_they_were() -> Iterator[None]:
    """What a test chose, the next one does not have."""
    yield
    library.choose("auto")


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a chat model with random weights: 512 tokens, 2 048 positions, a ChatML template with tools."""
    return write_chat_model(tmp_path_factory.mktemp("models") / "tiny-chat")


@pytest.fixture(scope="session")
def agent_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the chat model, with a template that writes calls and thoughts."""
    from tests.daemon.server.agent_model import TEMPLATE

    return write_chat_model(tmp_path_factory.mktemp("models") / "agent", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def engine() -> Any:
    from tests.daemon.server.scripted import ScriptedEngine

    return ScriptedEngine()


@pytest.fixture(scope="module")
def agent(agent_model: Path, engine: Any) -> Iterator[Any]:
    """The application of that model over the scripted engine."""
    from tests.daemon.server.scripted import scripted_app

    with scripted_app(agent_model, engine) as running:
        yield running


@pytest.fixture(scope="session")
def daemon(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon for the whole session. Tests that stop or disturb one start their own."""
    flags = serve_flags(chat_model, tmp_path_factory.mktemp("daemon") / "kv")
    with DaemonProcess(*flags) as process:
        _shared.append(process.wait_ready())
        yield process
        _shared.clear()


_shared: list[DaemonProcess] = []
"""The session's daemon while it shall live."""


@pytest.fixture(autouse=True)
def shared_daemon_lives() -> Iterator[None]:
    """The test during which the session's daemon ends fails, and says how it ended; all later ones only see that it is
    gone."""
    yield
    while _shared and (code := _shared[0].process.poll()) is not None:
        daemon = _shared.pop()
        log = "\n".join(daemon.lines[-100:])
        raise AssertionError(f"the session's daemon, process {daemon.process.pid}, has ended with {code}:\n{log}")


@pytest.fixture
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of configuration, of the hub and of other programs of this test alone."""
    from huggingface_hub import constants

    from diskprefix.runtime.files import manifests

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("OLLAMA_MODELS", "LLAMA_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(manifests, "_OF_OLLAMAS_SERVICE", str(tmp_path / "service"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
