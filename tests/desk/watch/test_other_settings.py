"""A prompt that another start has saved, with other options, is missed by name: in the reply, the log, the counts and
`inspect`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.server.daemon_process import DaemonProcess, command, reply_to, running_as, running_daemon
from tests.desk.conftest import Run

PROMPT = "The water of the river is high in spring, and the bridge is closed then. " * 12
OTHERS = {"--kv-type": ("auto", "q8"), "--block-size": ("16", "128"), "--runtime": ("auto", "grid")}
"""The first and the second value."""


def asked(daemon: DaemonProcess, prompt: str = PROMPT, path: str = "/v1/chat/completions", **body: Any) -> Any:
    with daemon.client() as client:
        message = {"role": "user", "content": prompt}
        answer = reply_to(client, {"model": "tiny-chat", "messages": [message], "max_tokens": 2} | body, path)
    daemon.wait_saved()
    return answer["prefix_cache"]


@pytest.mark.parametrize("flag", OTHERS)
def test_a_changed_option_is_named_by_the_log_the_reply_and_the_list(
    flag: str, chat_model: Path, tmp_path: Path, run: Run
) -> None:
    was, value = OTHERS[flag]
    folder, changed = tmp_path / "kv", {flag.removeprefix("--").replace("-", "_"): value}
    with running_daemon(chat_model, folder) as daemon:
        assert asked(daemon)["miss_reason"] == "new"
        assert "were made with" not in daemon.log
    with running_daemon(chat_model, folder, **changed) as daemon:
        daemon.wait_for_line(rf"1 saved prompt of this model was made with {flag} {was}; this start does not find it")
        report = asked(daemon)
        assert (report["restored"], report["miss_reason"], report["stored_with"]) == (0, "other_settings", {flag: was})
        assert asked(daemon, "Something else. " * 60)["miss_reason"] != "other_settings"
        assert asked(daemon)["restored"] > 0
        row = lost_to_other_settings(folder)
        assert (row["options"], row["solved_since"]) == (f"{flag} {was}", None)
        assert f"stored with {flag} {was}" in row["what"]
        assert f"start with {flag} {was}" in row["advice"]
    assert lost_to_other_settings(folder)["solved_since"] is None, "no daemon has the option yet"
    assert {flag: was} in [entry["made_with"] for entry in command("inspect", folder)["entries"]]
    for view in ((), ("--stats",), ("--tree",)):
        listed = run("inspect", *view, "--kv-cache-dir", folder).stdout
        assert "made with" in listed, view
        assert listed.count(f"{flag} {was}") == 1, view
        assert f"{flag} {value}" in listed, view
    for flag_of_view, rows in (("--stats", "roots"), ("--tree", "trees")):
        parted = [row["made_with"] for row in command("inspect", folder, flag_of_view)[rows] if row["made_with"]]
        assert sorted(parted, key=str) == sorted([{flag: was}, {flag: value}], key=str), rows
    with running_daemon(chat_model, folder) as daemon:
        assert asked(daemon)["restored"] > 0, "the first start's prompt is found again"
        solved = lost_to_other_settings(folder)
        assert solved["tokens"] == row["tokens"], "the loss of the day is still counted"
        assert solved["solved_since"] == pytest.approx(time.time(), abs=300)
        assert f"solved: {flag} {was} has been in effect for" in solved["advice"]
        lines = run("inspect", "--lost", "--kv-cache-dir", folder).stdout.splitlines()
        assert f"{row['tokens']:,} of them for a reason that is solved" in lines[-1]
        with daemon.client() as client:
            [shown] = client.get("/dashboard/state").json()["lost"]
            assert shown["solved_since"] == solved["solved_since"], "nothing was lost with these options"
            trees = client.get("/dashboard/entries").json()["trees"]
            assert {tree["options"] for tree in trees} == {f"{flag} {was}", f"{flag} {value}"}


def lost_to_other_settings(folder: Path) -> dict[str, Any]:
    (row,) = [row for row in command("inspect", folder, "--lost")["lost"] if row["cause"] == "other_settings"]
    return dict(row)


def test_options_that_part_nothing_are_not_named(chat_model: Path, tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "kv"
    with running_daemon(chat_model, folder) as daemon:
        asked(daemon)
    with running_daemon(chat_model, folder, speculative="off", context="1024", served_model_name="tiny-chat") as daemon:
        assert asked(daemon)["restored"] > 0
        assert "made with" not in daemon.log
    for view in ((), ("--stats",), ("--tree",)):
        assert "made with" not in run("inspect", *view, "--kv-cache-dir", folder).stdout


def test_each_api_streamed_or_not_and_behind_a_router_names_the_option(chat_model: Path, tmp_path: Path) -> None:
    folder, message = tmp_path / "kv", {"role": "user", "content": PROMPT}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [message], "max_tokens": 2},
        "/v1/messages": {"messages": [message], "max_tokens": 2},
        "/v1/responses": {"input": PROMPT, "max_output_tokens": 2, "store": False},
        "/api/chat": {"messages": [message], "options": {"num_predict": 2}},
    }
    with running_daemon(chat_model, folder) as daemon:
        asked(daemon)
    expected = '"miss_reason":"other_settings","stored_with":{"--kv-type":"auto"}'
    with running_as("behind a router", chat_model, folder, kv_type="q8") as daemon, daemon.client() as client:
        daemon.wait_for_line("1 saved prompt of this model was made with --kv-type auto")
        for path, body in bodies.items():
            for stream in (False, True):
                whole = body | {"model": "tiny-chat", "stream": stream, "prefix_cache": {"save": False}}
                answer = client.post(path, json=whole)
                assert answer.status_code == 200, answer.text
                assert expected in answer.text.replace(" ", ""), (path, stream, answer.text[-600:])
