"""The front, its workers and the spare as processes that die in turn. Most tests have workers that do nothing."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from pathlib import Path

import httpx
import pytest

from diskprefix.errors import DeviceLost
from diskprefix.extras.front import nursery
from diskprefix.extras.front.nursery import WorkerLine
from diskprefix.extras.front.workers import Deaths
from tests.server.daemon_process import DaemonProcess, clean_environment, serve_flags, wait_until
from tests.server.process.test_process import BODY, CHAT, ENDLESS, Notifications, next_data


def small(action: str, fifo: Path | str = "", **environment: str) -> DaemonProcess:
    module = "tests.extras.front.small_workers"
    return DaemonProcess(str(fifo), action, module=module, fresh=True, environment=clean_environment(**environment))


def family(pid: int) -> list[int]:
    """The processes below one: the nursery first."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [below for child in children for below in family(child)]


def is_gone(pid: int) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


def wait_for(daemon: DaemonProcess, line: str, count: int = 1) -> None:
    """Waits until the log has so many lines with a text."""
    wait_until(lambda: len([found for found in daemon.lines if line in found]) >= count, line, 120)


def wait_for_worker(daemon: DaemonProcess, count: int = 1) -> int:
    """Waits for the worker of this number. Returns its process."""
    wait_for(daemon, " is for ", count)
    return [int(found[1]) for line in daemon.lines if (found := re.search(r"process (\d+) is for", line))][count - 1]


def test_a_death_at_once_is_followed_by_longer_and_longer_waits_and_one_after_long_service_is_not() -> None:
    deaths = Deaths()
    assert [deaths.delay_s(0) for _ in range(9)] == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert deaths.delay_s(served_s=3600) == 0
    assert deaths.delay_s(0) == 1


def test_another_worker_answers_from_disk_when_one_is_killed(chat_model: Path, tmp_path: Path) -> None:
    with DaemonProcess(*serve_flags(chat_model, tmp_path / "kv"), "--standby") as daemon:
        wait_for(daemon, "a spare is ready")
        with daemon.client() as client:
            first = client.post(CHAT, json=BODY).json()
        daemon.wait_saved()
        with httpx.stream("POST", daemon.url + CHAT, json=ENDLESS, timeout=60) as broken:
            lines = broken.iter_lines()
            next_data(lines)
            os.kill(wait_for_worker(daemon), signal.SIGKILL)
            again = httpx.post(daemon.url + CHAT, json=BODY, timeout=60).json()
            with pytest.raises(httpx.TransportError):
                list(lines)
        assert again["choices"] == first["choices"]
        assert again["prefix_cache"]["source"] == "disk"
        assert daemon.stop(signal.SIGTERM) == 0


def test_who_dies_is_replaced_and_all_end_together() -> None:
    with small("serve") as daemon:
        wait_for(daemon, "a spare is ready")
        forks, spare = family(daemon.process.pid)[0], family(daemon.process.pid)[-1]
        os.kill(wait_for_worker(daemon), signal.SIGKILL)
        second = wait_for_worker(daemon, 2)
        assert second in family(spare), "it comes from the spare"
        os.kill(spare, signal.SIGKILL)
        wait_for(daemon, "a spare is ready", 2)
        os.kill(forks, signal.SIGKILL)
        wait_for(daemon, "another is made in 0 s")
        assert not is_gone(second), "the worker goes on"
        os.kill(second, signal.SIGKILL)
        third = wait_for_worker(daemon, 3)
        wait_for(daemon, f"serving in {third}")
        all_of_them = family(daemon.process.pid)
        assert daemon.stop(signal.SIGTERM) == 0
        wait_until(lambda: all(map(is_gone, all_of_them)), "all end")


def test_nothing_outlives_a_front_that_is_killed(tmp_path: Path) -> None:
    with small("serve", TMPDIR=str(tmp_path)) as daemon:
        wait_for(daemon, "a spare is ready")
        all_of_them = family(daemon.process.pid)
        assert len(all_of_them) == 3
        (folder,) = tmp_path.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700, "only its user reaches the workers' sockets"
        assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
        wait_until(lambda: all(map(is_gone, all_of_them)), "the worker, the spare and what forked them end")
        assert not folder.exists()


def test_a_worker_ends_whose_front_died_with_unread_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(nursery, "notify_through", lambda _channel: None)
    monkeypatch.setattr(nursery, "_ORPHAN_S", 0.0)
    monkeypatch.setattr(os, "kill", lambda _pid, _number: None)
    monkeypatch.setattr(os, "_exit", lambda _code: ended.set())
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        theirs.send(b"WATCHDOG=1")
        ours.close()
        WorkerLine(theirs, lambda: None)
        assert ended.wait(30)


def test_the_port_is_free_when_the_front_was_killed(chat_model: Path, tmp_path: Path) -> None:
    never_written = tmp_path / "template"
    os.mkfifo(never_written)
    flags = serve_flags(chat_model, tmp_path / "kv", chat_template=never_written)
    with DaemonProcess(*flags, "--standby") as daemon:
        port = int(daemon.url.rpartition(":")[2])
        wait_until(lambda: httpx.get(daemon.url + "/health", timeout=60).status_code == 503, "it loads")
        worker = wait_for_worker(daemon)
        assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
        socket.create_server(("127.0.0.1", port)).close()
        wait_until(lambda: is_gone(worker), "the worker ends")


@pytest.mark.parametrize(
    ("action", "number"), [("load", signal.SIGTERM), ("load", signal.SIGINT), ("hang", signal.SIGTERM)]
)
def test_a_signal_while_the_worker_loads_ends_all_with_0(action: str, number: signal.Signals) -> None:
    with small(action) as daemon:
        wait_for(daemon, "loading in")
        daemon.process.send_signal(signal.SIGHUP)
        assert daemon.stop(number) == 0
        assert not any("was killed by" in line for line in daemon.lines), "it does not listen for that yet"


def test_a_signal_while_the_spare_imports_ends_all_with_0(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with small("serve", fifo=fifo) as daemon:
        wait_for(daemon, "the spare imports")
        all_of_them = family(daemon.process.pid)
        assert daemon.stop(signal.SIGTERM) == 0
        wait_until(lambda: all(map(is_gone, all_of_them)), "all end")


def test_a_hangup_is_for_the_worker_alone() -> None:
    with small("serve") as daemon:
        wait_for(daemon, "a spare is ready")
        daemon.process.send_signal(signal.SIGHUP)
        wait_for(daemon, "the keys are read again")
        assert [pid for pid in family(daemon.process.pid) if is_gone(pid)] == []
        assert daemon.stop(signal.SIGTERM) == 0


@pytest.mark.parametrize("code", [2, 3, 4])
def test_an_error_of_the_only_model_that_another_start_would_meet_too_ends_all_with_its_code(code: int) -> None:
    with small(str(code)) as daemon:
        assert daemon.process.wait(60) == code


@pytest.mark.parametrize(
    ("action", "how"),
    [("die", "was killed by SIGKILL"), (str(DeviceLost.exit_code), f"ended with exit code {DeviceLost.exit_code}")],
)
def test_a_worker_that_dies_at_once_is_started_more_and_more_slowly(action: str, how: str) -> None:
    with small(action) as daemon:
        daemon.wait_for_line(f"{how}; another is started$")
        daemon.wait_for_line(r"another is started in 1 s: it died 2 times in a row")
        # Between two of them: how a worker ended is the exit code of the front.
        wait_for(daemon, "another is started in 2 s: it died 3 times in a row")
        assert daemon.stop(signal.SIGTERM) == 0


def test_systemd_hears_from_the_front_alone_and_a_worker_that_stands_still_is_killed(tmp_path: Path) -> None:
    heard = Notifications(str(tmp_path / "notify"))
    variables = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "1000000"}
    with small("serve", **variables) as daemon:
        wait_for(daemon, "a spare is ready")
        assert "WATCHDOG=1" in heard.messages
        assert any(message.startswith("READY=1") for message in heard.messages)
        assert "STATUS=serving" in heard.messages
        os.kill(wait_for_worker(daemon), signal.SIGSTOP)
        daemon.wait_for_line("the worker gave no sign of life for 1 s")
        wait_for(daemon, f"serving in {wait_for_worker(daemon, 2)}")
        assert daemon.stop() == 0
    wait_until(lambda: any(message.startswith("STOPPING=1") for message in heard.messages), "STOPPING=1")
    heard.close()
