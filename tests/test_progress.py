from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from diskprefix import progress
from diskprefix.progress import progress_bar


def test_without_a_terminal_every_quarter_is_a_line() -> None:
    lines: list[str] = []
    with progress_bar("working", 8, lines.append) as advance:
        for done in (1, 2, 3, 7, 5, 8):
            advance(done)
    assert lines == ["working", "working: 25 %", "working: 75 %"]


def test_a_line_tells_how_long_it_still_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    lines, now = list[str](), iter((100.0, 105.0, 130.0, 130.5))
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(now)))
    with progress_bar("working", 8, lines.append) as advance:
        for done in (2, 4, 7.8):
            advance(done)
    assert lines == ["working", "working: 25 %, about 15 s more", "working: 50 %, about 30 s more", "working: 75 %"]


@pytest.mark.parametrize("in_bytes", [False, True])
def test_on_a_terminal_a_bar_is_drawn_below_one_line(
    in_bytes: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    lines: list[str] = []
    with progress_bar("working", 2048, lines.append, in_bytes=in_bytes) as advance:
        advance(1024)
        advance(512)
    out, err = capsys.readouterr()
    assert (out, lines) == ("", ["working"])
    assert "working" in err
    assert ("1.0/2.0 KiB" if in_bytes else "50%") in err


@pytest.mark.parametrize("in_bytes", [False, True])
def test_a_long_label_does_not_cut_off_how_long_it_still_takes(
    in_bytes: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("TTY_COMPATIBLE", "1"), ("TERM", "xterm"), ("COLUMNS", "80")):
        monkeypatch.setenv(name, value)
    with progress_bar("measuring " * 9, 2e9, list[str]().append, in_bytes=in_bytes) as advance:
        advance(1e9)
    err = capsys.readouterr().err
    assert "measuring" in err
    assert "0:00:00" in err
    assert "-:--:--" in err


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "dumb")
    lines: list[str] = []
    with progress_bar("working", 1, lines.append):
        pass
    assert lines == ["working"]


def test_the_line_does_not_wait_for_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    lines: list[str] = []
    with pytest.raises(ImportError), progress_bar("working", 1, lines.append):
        pass
    assert lines == ["working"]
