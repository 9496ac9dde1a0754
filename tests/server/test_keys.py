"""The file of `--api-keys`: what it may hold, who may read it, and that no message shows what is in it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from diskprefix.errors import SettingsError
from diskprefix.nouns import Tenant
from diskprefix.server.keys import ApiKeys

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef#+/="


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.touch(0o600)
    return path


def keys_of(file: Path, content: str | bytes) -> ApiKeys:
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return ApiKeys(file)


def refusal(file: Path, content: str | bytes) -> str:
    with pytest.raises(SettingsError) as caught:
        keys_of(file, content)
    assert caught.value.exit_code == 2
    assert caught.value.message.startswith("--api-keys: ")
    assert str(file) in caught.value.message
    assert "\n" not in caught.value.message
    return caught.value.message


def test_a_line_is_a_key_or_a_name_and_a_key(file: Path) -> None:
    keys = keys_of(file, f"\ufeff# ours\r\n\n  alice-at-school\t{ALICE}  \r\n   # {'x' * 20}\n{BOB}\n")
    alice, bob = keys.caller(f"Bearer {ALICE}"), keys.caller(f"Bearer {BOB}")
    assert alice is not None
    assert bob is not None
    assert (alice.name, alice.tenant, alice.sees_all) == ("alice-at-school", Tenant.of_key(ALICE), False)
    assert (bob.tenant, bob.sees_all) == (Tenant.of_key(BOB), False)
    assert bob.name == str(bob.tenant)[:8], "what a key without a name is called must not be a part of it"


def test_only_the_name_admin_sees_all(file: Path) -> None:
    keys = keys_of(file, f"admin {ALICE}\nAdmin {BOB}")
    admin, other = keys.caller(f"Bearer {ALICE}"), keys.caller(f"Bearer {BOB}")
    assert admin is not None
    assert other is not None
    assert (admin.sees_all, other.sees_all) == (True, False)


@pytest.mark.parametrize(
    "header",
    [
        *(None, "", "Bearer", "Bearer ", ALICE, f"Basic {ALICE}", f"Bearer{ALICE}", f"Bearer {ALICE}x"),
        *(f"Bearer {ALICE[:-1]}", f"Bearer {ALICE.upper()}", f"Bearer {ALICE} {ALICE}", f"Bearer {ALICE}, x"),
        *("Bearer alice", "Bearer \xff\xfe", f"Bearer {ALICE}\n", f"Bearer\n{ALICE}"),
    ],
)
def test_any_other_header_is_nobodys(file: Path, header: str | None) -> None:
    assert keys_of(file, f"alice {ALICE}").caller(header) is None


@pytest.mark.parametrize("header", [f"Bearer {ALICE}", f"bearer {ALICE}", f"BEARER   {ALICE} "])
def test_the_scheme_may_be_written_in_any_case(file: Path, header: str) -> None:
    assert keys_of(file, f"alice {ALICE}").caller(header) is not None


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("swordfish", "at least 16 characters"),
        ("alice swordfish", "at least 16 characters"),
        ("swordfish-swordfish alice", "fewer than 16 characters"),
        ("swordfish-swordfish alice-of-the-front-end", "fewer than 16 characters"),
        (f"alice {ALICE} # swordfish", "a comment takes a line of its own"),
        ("swordfishswordfisch\xe4", "printable ASCII"),
        ("swordfish\x00swordfish", "printable ASCII"),
        (f"sword\x1bfish {ALICE}", "printable"),
        (f"swordfish-123456 {ALICE}", "fewer than 16 characters"),
        (f"again {BOB}", "in the file already"),
    ],
)
def test_a_wrong_line_is_named_by_its_number_and_never_shown(file: Path, line: str, reason: str) -> None:
    message = refusal(file, f"# comment\nbob {BOB}\n\n{line}\ncarol carol-0123456789abcdef\n")
    assert f"{file}:4: " in message
    assert reason in message
    assert "sword" not in message
    assert ALICE not in message
    assert BOB not in message


@pytest.mark.parametrize("content", ["", "\n\n", "# nothing\n"])
def test_a_file_without_a_key_is_refused(file: Path, content: str) -> None:
    assert "holds no key" in refusal(file, content)


@pytest.mark.parametrize(("content", "reason"), [(b"\xff\xfek", "UTF-8"), (b"#" * (1 << 20) + b"#", "larger than")])
def test_what_is_no_file_of_keys_is_refused(file: Path, content: bytes, reason: str) -> None:
    assert reason in refusal(file, content)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o644, 0o666])
def test_a_file_that_others_may_read_or_write_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    message = refusal(file, ALICE)
    assert f"mode {mode:04o}" in message
    assert "chmod 600" in message


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_file_that_is_private_is_read(file: Path, mode: int) -> None:
    file.write_text(ALICE)
    file.chmod(mode)
    assert ApiKeys(file).caller(f"Bearer {ALICE}") is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file away")
def test_a_file_of_another_user_is_refused(file: Path) -> None:
    os.chown(file, 12345, -1)
    assert "uid 12345" in refusal(file, ALICE)


def test_a_credential_of_systemd_may_look_readable_by_the_group(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(ALICE)
    file.chmod(0o440)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(file.parent))
    assert ApiKeys(file).caller(f"Bearer {ALICE}") is not None
    for mode in (0o460, 0o444, 0o442):
        file.chmod(mode)
        assert f"mode {mode:04o}" in refusal(file, ALICE)
    file.chmod(0o440)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(file.parent)[:-1])
    assert "mode 0440" in refusal(file, ALICE)


def test_a_file_that_is_not_there_and_what_is_none_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, reason in (("nothing", "No such file"), ("", "Is a directory"), ("pipe", "is not a file")):
        with pytest.raises(SettingsError, match=reason):
            ApiKeys(tmp_path / name)


def test_the_file_is_read_again_only_when_it_was_asked_for(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = keys_of(file, f"alice {ALICE}")
    file.write_text(f"bob {BOB}")
    assert keys.caller(f"Bearer {BOB}") is None
    with caplog.at_level(logging.INFO, "diskprefix"):
        keys.read_again()
    assert keys.caller(f"Bearer {ALICE}") is None
    assert keys.caller(f"Bearer {BOB}") is not None
    assert "1 API keys read again" in caplog.text


def test_while_the_file_is_wrong_the_keys_read_before_stay_in_force(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = keys_of(file, f"alice {ALICE}")
    file.write_text("short")
    keys.read_again()
    assert keys.caller(f"Bearer {ALICE}") is not None
    assert "at least 16 characters" in caplog.text
    assert "stay in force" in caplog.text


def test_nothing_that_is_kept_holds_a_key(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        keys = keys_of(file, f"alice {ALICE}\n{BOB}")
    for key in (ALICE, BOB):
        assert key not in repr(vars(keys))
        assert key not in caplog.text
