"""The modules that all others stand on: text for terminals, progress, memos, keys, tenants, and the line of the log."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields

from diskprefix import progress
from diskprefix.daemon.server.keys import OwnerToken
from diskprefix.errors import SettingsError
from diskprefix.memo import Memo
from diskprefix.prefixstore.namespace_key import NamespaceKey
from diskprefix.printable import escaped, printable_only, shown
from diskprefix.progress import progress_bar
from diskprefix.tenant_ids import matches
from diskprefix.user_key import user_key
from diskprefix.values import SHARED, CacheReport, Scope, Selection, Tenant

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=300)


@given(ANY_TEXT)
def test_whatever_comes_in_what_goes_out_is_printable(text: str) -> None:
    assert escaped(text).isprintable()
    assert printable_only(text).isprintable()
    assert shown(text, 20).isprintable()
    assert len(shown(text, 20)) <= 20


def test_text_that_is_printable_and_short_stays_as_it_is() -> None:
    text = "Größe 🦀 · 流れ"
    assert escaped(text) == printable_only(text) == shown(text) == text


def test_control_characters_are_written_as_python_writes_them() -> None:
    assert escaped("a\nb\x1b[31m\x9b\u2028\u202e\ud800") == r"a\nb\x1b[31m\x9b\u2028\u202e\ud800"


def test_what_is_cut_says_so() -> None:
    assert shown("x" * 101) == "x" * 99 + "…"
    assert shown("x" * 100) == "x" * 100


def test_blanks_of_any_kind_become_one_space() -> None:
    assert printable_only(" a\t\n b\u3000c\x1b[2Jd ") == "a b c[2Jd"


# Progress: lines, or a bar at a terminal.


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
def test_on_a_terminal_a_bar_is_drawn_below_one_line_and_says_how_long_it_still_takes(
    in_bytes: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a label that is too long, too."""
    for name, value in (("TTY_COMPATIBLE", "1"), ("TERM", "xterm"), ("COLUMNS", "80")):
        monkeypatch.setenv(name, value)
    lines: list[str] = []
    with progress_bar("measuring " * 9, 2048, lines.append, in_bytes=in_bytes) as advance:
        advance(1024)
        advance(512)
    out, err = capsys.readouterr()
    assert (out, lines) == ("", ["measuring " * 9])
    for text in ("measuring", "0:00:00", "-:--:--", "1.0/2.0" if in_bytes else "50%"):
        assert text in err


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


# Memos: small files of what was measured.


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "diskprefix"


@pytest.mark.usefixtures("home")
def test_a_value_is_found_by_another_memo_of_the_same_version_only() -> None:
    Memo("speed", version=1).put("a", [1, 2])
    assert Memo("speed", version=1).get("a") == [1, 2]
    assert Memo("speed", version=2).get("a") is None


# The key of a user.


DAEMON = "127.0.0.1:8642"


def test_a_user_has_one_key_which_others_cannot_read_and_other_daemons_are_not_told(home: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        drawn = set(pool.map(lambda _: user_key(DAEMON), range(32)))
    secret = (home / "key").read_text().strip()
    assert ((home / "key").stat().st_mode & 0o777, len(secret)) == (0o600, 64)
    assert drawn == {user_key(DAEMON)}
    assert len(drawn | {user_key("127.0.0.1:8643"), secret}) == 3


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        ("a" * 64 + "\n", 0o640, "the key of this user: others may read or write .*; run `chmod 600` on it"),
        *((text, 0o600, "the key of this user: .* holds none; remove the file") for text in ("x", "a" * 64, "a" * 99)),
        ("", 0o600, None),
        (None, 0o600, "the key of this user: cannot make .*: File exists"),
    ],
)
def test_a_file_that_holds_no_key_or_that_others_may_read_is_refused(
    home: Path, content: str | None, mode: int, words: str | None
) -> None:
    if content is None:
        home.write_text("a file in the place of the folder")
    else:
        home.mkdir()
        (home / "key").write_text(content)
        (home / "key").chmod(mode)
    if words is None:
        # The process that made the file was killed before it wrote.
        assert len(user_key(DAEMON)) == 64
        return
    with pytest.raises(SettingsError, match=words):
        user_key(DAEMON)
    # A daemon starts without it.
    assert OwnerToken.drawn().tenant.ids


def test_a_folder_that_is_another_users_is_one_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `sudo` leaves it."""

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "geteuid", lambda: 1)
    monkeypatch.setattr(os, "stat", denied)
    monkeypatch.setattr(Path, "mkdir", denied)
    with pytest.raises(SettingsError, match=rf"cannot make {home}/key: Permission denied"):
        user_key(DAEMON)


@pytest.mark.usefixtures("home")
def test_the_newest_records_are_kept() -> None:
    memo = Memo("speed", version=1, max_records=2)
    for number in range(4):
        memo.put(str(number), number)
    assert [memo.get(str(number)) for number in range(4)] == [None, None, 2, 3]


CONTENTS = [b"[", b"", b"\xff\xfe", b"[]", b"null", b'{"format": 1}', b'{"format": 1, "records": []}']


@pytest.mark.parametrize("content", CONTENTS)
def test_a_file_that_is_no_memo_is_replaced(content: bytes, home: Path) -> None:
    home.mkdir()
    (home / "speed.json").write_bytes(content)
    memo = Memo("speed", version=1)
    assert memo.get("a") is None
    memo.put("a", 1)
    assert memo.get("a") == 1


def test_a_link_at_the_name_that_a_process_would_choose_is_not_written_through(home: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("another's")
    home.mkdir()
    (home / f".speed.json.{os.getpid()}").symlink_to(victim)
    (home / "speed.json").symlink_to(victim)
    Memo("speed", version=1).put("a", 1)
    assert victim.read_text() == "another's"
    assert Memo("speed", version=1).get("a") == 1


def test_a_folder_that_cannot_be_written_is_no_error(home: Path) -> None:
    home.write_text("a file")
    memo = Memo("speed", version=1)
    memo.put("a", 1)
    assert memo.get("a") is None


def test_root_reads_and_writes_no_memo_in_a_folder_of_others(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A memo lists the exact kernels, so others could change what a model answers, or have root write elsewhere."""
    memo = Memo("speed", version=1)
    memo.put("a", 1)
    home.chmod(0o777)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    memo.put("a", 2)
    assert memo.get("a") is None
    home.chmod(0o700)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(home.parent))
    assert memo.get("a") == 1


# The key that machines share.

SECRET = b"a secret of enough bytes"


def test_the_same_key_gives_the_same_values_on_every_machine(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(b" " + SECRET + b"\n")
    file.chmod(0o600)
    key = NamespaceKey.read(file)
    assert key == NamespaceKey.of(SECRET)
    # They are a part of the format of remote objects.
    assert (key.names_seed, key.digest.hex()) == (0x42BFF5D92228D097, "faad5f2fd1d3490b01cfe194f505acbc")


def test_no_derived_value_is_a_part_of_another_one() -> None:
    key = NamespaceKey.of(SECRET)
    other = NamespaceKey.of(SECRET + b"!")
    seed = key.names_seed.to_bytes(8, "little")
    assert not key.mac_key.startswith((seed, key.digest))
    assert not key.digest.startswith(seed)
    assert key.names_seed != other.names_seed
    assert key.mac_key != other.mac_key
    assert key.digest != other.digest
    assert key.mac_key.hex() not in repr(key)


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        *((content, 0o600, ".*must hold 16 to 4096 bytes") for content in (b"", b"too short", b" " * 100, b"x" * 5000)),
        *((SECRET, mode, "others may .*; run `chmod 600` on it") for mode in (0o640, 0o604, 0o620, 0o602, 0o666)),
        (None, 0, "cannot read .*: No such file"),
    ],
)
def test_a_file_without_a_secret_or_that_others_may_read_or_write_is_refused(
    content: bytes | None, mode: int, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
        file.chmod(mode)
    with pytest.raises(SettingsError, match=f"--namespace-key-file: {words}"):
        NamespaceKey.read(file)


# Who a tenant is, what is written of it, and which of them a name means.

KEY, SALT = "sk-0123456789abcdef", "user-1"
_NAMES = st.text(st.characters(codec=None), min_size=1, max_size=20)


def test_ids_stay_what_they_are() -> None:
    """They are part of the roots: another id would lose what is stored."""
    assert str(SHARED.with_salt(SALT)) == "f3c2009eb87c5ee855766934969045ad"
    assert str(Tenant.of_key(KEY)) == "b644dd215dc06ecbcbd44d346405d0e1"


def test_neither_key_nor_salt_can_be_read_from_a_tenant() -> None:
    tenant = Tenant.of_key(KEY).with_salt(SALT)
    assert KEY not in f"{tenant!r}{tenant}"
    assert SALT not in f"{tenant!r}{tenant}"


@given(_NAMES, _NAMES)
def test_different_salts_and_keys_are_different_tenants(one: str, other: str) -> None:
    by_one = {SHARED.with_salt(one), Tenant.of_key(one), Tenant.of_key(one).with_salt(one), SHARED}
    by_other = {SHARED.with_salt(other), Tenant.of_key(other), Tenant.of_key(one).with_salt(other), SHARED}
    assert len(by_one) == 4
    assert len(by_one | by_other) == (4 if one == other else 7)


@given(_NAMES)
def test_no_salt_names_the_tenant_of_a_key(salt: str) -> None:
    key = Tenant.of_key(KEY)
    for chosen in (salt, KEY, str(key), f"diskprefix api key\0{KEY}", f"\0{KEY}"):
        assert SHARED.with_salt(chosen) != key
        assert key.with_salt(chosen).ids[0] == key.ids[0]


@given(st.lists(_NAMES, max_size=3), st.sampled_from([SHARED, Tenant.of_key(KEY)]))
def test_a_tenant_is_read_back_from_its_text(salts: list[str], tenant: Tenant) -> None:
    for salt in salts:
        tenant = tenant.with_salt(salt)
    assert Tenant.parse(str(tenant)) == tenant


@pytest.mark.parametrize("text", ["/", "abc", "g" * 32, "A" * 32, "a" * 33, f"{'a' * 32}/", f"{'a' * 32}//{'b' * 32}"])
def test_other_texts_are_no_tenants(text: str) -> None:
    with pytest.raises(ValueError, match="not a tenant"):
        Tenant.parse(text)


KEYED, SALTED = Tenant.of_key(KEY), SHARED.with_salt(SALT)
BOTH, OTHER = KEYED.with_salt(SALT), Tenant.of_key(KEY + "x").with_salt(SALT)
TENANTS = (SHARED, KEYED, SALTED, BOTH, OTHER, KEYED.with_salt("user-2"))
SHORTENED = (lambda text: text[:7], lambda text: text[1:], lambda text: text + "/", lambda _: "")


@pytest.mark.parametrize(
    ("wanted", "meant"),
    [
        *((text, {KEYED, BOTH, TENANTS[-1]}) for text in (KEY, str(KEYED), str(KEYED)[:8], str(KEYED).upper())),
        *((text, {SALTED, BOTH, OTHER}) for text in (SALT, str(SALTED), str(SALTED)[:12])),
        *((text, {BOTH}) for text in (str(BOTH), "/".join(part[:8] for part in BOTH.ids))),
        *((shorten(str(tenant)), set[Tenant]()) for tenant in (SHARED, SALTED, BOTH) for shorten in SHORTENED),
    ],
)
def test_a_key_or_a_salt_means_all_tenants_with_it_and_less_than_eight_digits_mean_nobody(
    wanted: str, meant: set[Tenant]
) -> None:
    assert {tenant for tenant in TENANTS if matches(str(tenant), wanted)} == meant


# The debug log's line about one request holds everything that the response leaves out.

SELECTION = Selection(
    scope=Scope("auto", 30),
    prompt_tokens=1502,
    reason="best_checkpoints",
    selected=1432,
    aligned=1280,
    checkpoints=(512, 1280),
    votes=(3, 1),
    window=30,
    recent=12,
    common=1440,
    seen=1280,
    price=256,
    lost=7,
    trials=11,
    again=4,
)


def test_the_log_line_of_a_hit_holds_every_figure_once() -> None:
    report = CacheReport(
        selection=SELECTION,
        restored=1280,
        source="disk",
        matched=1502,
        refused="no_logits",
        restore_ms=9.126,
        saved="queued",
    )
    assert report.log_line() == (
        "[disk-cache] restored=1280 source=disk matched=1502 refused=no_logits"
        " restore_ms=9.13 saved=queued replayed=0 unverified=0 scope=auto:30 prompt_tokens=1502"
        " reason=best_checkpoints selected=1432 aligned=1280 keep_tail=false saves_reply=false"
        " checkpoints=512,1280 votes=3,1 window=30 recent=12 common=1440 seen=1280 price=256 lost=7"
        " trials=11 again=4"
    )
    names = [field.name for field in (*fields(CacheReport), *fields(Selection))]
    assert len(names) == len(set(names)), "a name would hide another"


def test_the_log_line_of_a_miss_says_where_the_prompt_diverged() -> None:
    report = CacheReport(selection=SELECTION, miss_reason="diverged")
    assert "restored=0 source=none miss_reason=diverged" in report.log_line()
    assert "common=1440" in report.log_line()
    assert report.diverged_at == 1440
    assert CacheReport(selection=SELECTION, miss_reason="not_stored").diverged_at is None
