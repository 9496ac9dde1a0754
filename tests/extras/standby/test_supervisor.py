"""`serve --standby` as processes: the worker, the spare and the supervisor die in turn.

One test is of the daemon itself. The others have a worker that does nothing, under the same supervisor.
"""

from __future__ import annotations

import errno
import os
import selectors
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from diskprefix.errors import DeviceLost
from diskprefix.extras.standby import supervisor
from diskprefix.extras.standby.supervisor import Child, Deaths, Supervisor, SupervisorLine
from tests.server.daemon_process import DaemonProcess, clean_environment, serve_flags, wait_until
from tests.server.process.test_process import BODY, CHAT, ENDLESS, Notifications, next_data


def supervised(action: str, fifo: Path | str = "", **environment: str) -> DaemonProcess:
    return DaemonProcess(
        str(fifo),
        action,
        module="tests.extras.standby.supervised",
        fresh=True,
        environment=clean_environment(**environment),
    )


def children(daemon: DaemonProcess) -> list[int]:
    """The worker and the spare: the older one serves."""
    pid = daemon.process.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_gone(pid: int) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


def wait_for(daemon: DaemonProcess, line: str, count: int = 1) -> None:
    """Waits until the log has so many lines with a text."""
    wait_until(lambda: len([found for found in daemon.lines if line in found]) >= count, line, 120)


def wait_for_spare(daemon: DaemonProcess, count: int) -> tuple[int, int]:
    """Waits for the spare of this number, the first is 1. Returns the worker and the spare."""
    wait_for(daemon, "a spare is ready", count)
    worker, spare = children(daemon)
    return worker, spare


def stop_while_none_runs(daemon: DaemonProcess) -> None:
    """Stops a supervisor whose workers all die at once, between two of them: how a worker ended is its exit code."""
    wait_for(daemon, "another is started in 2 s: it died 3 times in a row")
    assert daemon.stop(signal.SIGTERM) == 0


def test_a_death_at_once_is_followed_by_longer_and_longer_waits_and_one_after_long_service_is_not() -> None:
    deaths = Deaths()
    assert [deaths.delay_s(0) for _ in range(9)] == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert deaths.delay_s(served_s=3600) == 0
    assert deaths.delay_s(0) == 1


def test_the_spare_answers_from_disk_when_the_worker_is_killed(chat_model: Path, tmp_path: Path) -> None:
    with DaemonProcess(*serve_flags(chat_model, tmp_path / "kv"), "--standby") as daemon:
        worker, spare = wait_for_spare(daemon, 1)
        with daemon.client() as client:
            first = client.post(CHAT, json=BODY).json()
        daemon.wait_saved()
        with httpx.stream("POST", daemon.url + CHAT, json=ENDLESS, timeout=60) as broken:
            lines = broken.iter_lines()
            next_data(lines)
            os.kill(worker, signal.SIGKILL)
            again = httpx.post(daemon.url + CHAT, json=BODY, timeout=60).json()
            with pytest.raises(httpx.TransportError):
                list(lines)
        assert again["choices"] == first["choices"]
        assert again["prefix_cache"]["source"] == "disk"
        assert children(daemon)[0] == spare
        assert daemon.stop(signal.SIGTERM) == 0


def test_who_dies_is_replaced_and_all_end_together() -> None:
    with supervised("serve") as daemon:
        worker, spare = wait_for_spare(daemon, 1)
        os.kill(worker, signal.SIGKILL)
        worker, new_spare = wait_for_spare(daemon, 2)
        assert worker == spare
        os.kill(new_spare, signal.SIGKILL)
        worker_after, _ = wait_for_spare(daemon, 3)
        assert worker_after == worker
        both = children(daemon)
        assert daemon.stop(signal.SIGTERM) == 0
        assert all(map(is_gone, both))


@pytest.fixture
def due(monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    """A supervisor whose next worker is due, whose clock stands still, and whose processes are made up."""
    due = Supervisor(clock=lambda: 100.0)
    due._selector = selectors.DefaultSelector()
    due._worker_at = 100.0
    monkeypatch.setattr(os, "fork", lambda: 1234)
    monkeypatch.setattr(os, "kill", lambda _pid, _number: None)
    yield due
    for child in (due._worker, due._spare):
        if child is not None:
            child.channel.close()
    due._selector.close()


def test_of_a_spare_that_has_just_died_the_place_is_taken_by_a_new_worker(due: Supervisor) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    due._spare = Child(999, ours)
    due._start_what_is_due()
    assert due._worker is not None
    assert (due._worker.pid, due._worker_at) == (1234, None)
    assert ours.fileno() == -1, "it is forgotten"


def test_where_no_process_can_be_made_the_supervisor_tries_again_later(
    due: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> int:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fork", fail)
        due._start_what_is_due()
        assert (due._worker, due._worker_at) == (None, 101.0)
        assert not due._selector.get_map(), "nothing is left of the attempt"
    due._worker_at = 100.0
    due._start_what_is_due()
    assert due._worker is not None


def test_nothing_outlives_a_supervisor_that_is_killed() -> None:
    with supervised("serve") as daemon:
        both = wait_for_spare(daemon, 1)
        assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
        wait_until(lambda: all(map(is_gone, both)), "the worker and the spare end")


def test_a_worker_ends_whose_supervisor_died_with_unread_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(supervisor, "notify_through", lambda _channel: None)
    monkeypatch.setattr(os, "_exit", lambda _code: ended.set())
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        theirs.send(b"WATCHDOG=1")
        ours.close()
        SupervisorLine(theirs)
        assert ended.wait(30)


def test_the_port_is_free_when_the_supervisor_was_killed(chat_model: Path, tmp_path: Path) -> None:
    never_written = tmp_path / "template"
    os.mkfifo(never_written)
    flags = serve_flags(chat_model, tmp_path / "kv", chat_template=never_written)
    with DaemonProcess(*flags, "--standby") as daemon:
        port = int(daemon.url.rpartition(":")[2])
        wait_until(lambda: httpx.get(daemon.url + "/health", timeout=60).status_code == 503, "it loads")
        (worker,) = children(daemon)
        assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
        wait_until(lambda: is_gone(worker), "the worker ends")
    socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_worker_loads_ends_all_with_0(number: signal.Signals) -> None:
    with supervised("load") as daemon:
        wait_for(daemon, "loading in")
        assert daemon.stop(number) == 0


def test_a_signal_while_the_spare_imports_ends_all_with_0(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with supervised("serve", fifo=fifo) as daemon:
        wait_for(daemon, "the spare imports")
        both = children(daemon)
        assert len(both) == 2
        assert daemon.stop(signal.SIGTERM) == 0
        assert all(map(is_gone, both))


def test_a_hangup_is_for_the_worker_alone() -> None:
    with supervised("serve") as daemon:
        both = wait_for_spare(daemon, 1)
        daemon.process.send_signal(signal.SIGHUP)
        wait_for(daemon, "the keys are read again")
        assert [pid for pid in both if is_gone(pid)] == []
        assert daemon.stop(signal.SIGTERM) == 0


@pytest.mark.parametrize("code", [2, 3, 4])
def test_an_error_that_another_start_would_meet_too_ends_all_with_its_code(code: int) -> None:
    with supervised(str(code)) as daemon:
        assert daemon.process.wait(60) == code


def test_a_lost_accelerator_is_a_death_that_another_worker_follows() -> None:
    with supervised(str(DeviceLost.exit_code)) as daemon:
        wait_for(daemon, f"the worker ended with exit code {DeviceLost.exit_code}; another is started")
        stop_while_none_runs(daemon)


def test_a_worker_that_dies_at_once_is_started_more_and_more_slowly() -> None:
    with supervised("die") as daemon:
        daemon.wait_for_line(r"the worker was killed by SIGKILL; another is started$")
        daemon.wait_for_line(r"another is started in 1 s: it died 2 times in a row")
        stop_while_none_runs(daemon)


def test_systemd_hears_from_the_supervisor_alone_and_a_worker_that_stands_still_is_killed(tmp_path: Path) -> None:
    heard = Notifications(str(tmp_path / "notify"))
    variables = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "1000000"}
    with supervised("serve", **variables) as daemon:
        worker, spare = wait_for_spare(daemon, 1)
        assert "WATCHDOG=1" in heard.messages
        assert next(message for message in heard.messages if "READY=1" in message).startswith("READY=1\nSTATUS=serving")
        assert not any("SPARE" in message for message in heard.messages)
        os.kill(worker, signal.SIGSTOP)
        daemon.wait_for_line("the worker gave no sign of life for 1 s")
        wait_for(daemon, f"serving in {spare}")
        assert daemon.stop() == 0
    wait_until(lambda: any(message.startswith("STOPPING=1") for message in heard.messages), "STOPPING=1")
    heard.close()
