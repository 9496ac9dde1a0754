"""Whom a pack is from: keys and files of OpenSSH, with its real program."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from diskprefix.errors import SettingsError
from diskprefix.prefixstore.packs.signatures import allowed_signers, sign_digest, signer_of
from diskprefix.prefixstore.store.note_record import NoteKind
from diskprefix.prefixstore.store.store import Store
from diskprefix.user_key import user_tenant
from tests.desk.conftest import Run, saved
from tests.desk.conftest import run as run
from tests.prefixstore.packs.exported import TENANT, entry_of, export_all, joined, split
from tests.prefixstore.store.building import BLOCK, is_whole, open_store, prompt

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="OpenSSH is not installed")

PROMPT = prompt(1, 3 * BLOCK + 5)
DIGEST = "5f" * 32


def make_key(path: Path, kind: str = "ed25519") -> Path:
    path.parent.mkdir(exist_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", "", "-f", path], check=True)
    return path


def public(key: Path) -> str:
    return key.with_suffix(".pub").read_text().strip()


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return make_key(tmp_path / "keys" / "alice")


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "rsa"])
def test_a_signature_names_the_allowed_signer_and_nothing_else(tmp_path: Path, kind: str) -> None:
    signers, alice, bob = tmp_path / "signers", make_key(tmp_path / "a" / "k", kind), make_key(tmp_path / "b" / "k")
    signature = sign_digest(alice, DIGEST)
    assert signer_of(signature, DIGEST, signers) is None
    for line, name in (
        (f"alice@example.org {public(alice)}", "alice@example.org"),
        (f'alice@example.org namespaces="diskprefix" {public(alice)}', "alice@example.org"),
        (f'alice@example.org namespaces="git" {public(alice)}', None),
        (f'alice@example.org valid-before="20200101" {public(alice)}', None),
        (f"bob@example.org {public(bob)}", None),
        ("?", None),
    ):
        signers.write_text(f"# those I trust\n{line}\n")
        assert signer_of(signature, DIGEST, signers) == name, line
    signers.write_text(f"alice@example.org {public(alice)}\n")
    for other in (b"", b"\x1b[31m", signature[:-40], sign_digest(bob, DIGEST), sign_digest(alice, "00" * 32)):
        assert signer_of(other, DIGEST, signers) is None
    of_git = subprocess.run(
        ["ssh-keygen", "-Y", "sign", "-n", "git", "-f", alice],
        input=b"diskprefix pack sha256:",
        capture_output=True,
        check=True,
    )
    assert signer_of(of_git.stdout, DIGEST, signers) is None


def test_what_cannot_sign_is_named(tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="none: no such file; `ssh-keygen -t ed25519` makes a key"):
        sign_digest(tmp_path / "none", DIGEST)
    (tmp_path / "text").write_text("no key")
    with pytest.raises(SettingsError, match="text: ssh-keygen did not sign: "):
        sign_digest(tmp_path / "text", DIGEST)
    signers = tmp_path / "signers"
    signers.write_text(f"alice {public(key)}\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SettingsError, match="no ssh-keygen, which signs and verifies packs; install OpenSSH"):
        signer_of(b"something", DIGEST, signers)
    assert signer_of(b"", DIGEST, signers) is None


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o646])
def test_signers_whom_others_may_write_are_not_believed(tmp_path: Path, key: Path, mode: int) -> None:
    signers = tmp_path / "signers"
    signers.write_text(f"alice {public(key)}\n")
    signature = sign_digest(key, DIGEST)
    signers.chmod(mode)
    with pytest.raises(SettingsError, match=rf"others may write {signers} \(mode {mode:04o}\); run `chmod 644`"):
        signer_of(signature, DIGEST, signers)
    # A pack without a signature asks for no signer.
    assert signer_of(b"", DIGEST, signers) is None
    signers.chmod(0o644)
    assert signer_of(signature, DIGEST, signers) == "alice"


@pytest.fixture
def pack(run: Run, key: Path, tmp_path: Path) -> Path:
    """A signed pack of two prompts that two tenants have saved."""
    path = tmp_path / "two.safetensors"
    with closing(open_store(tmp_path / "from")) as store:
        for pub in (entry_of(store, PROMPT), entry_of(store, prompt(2, 2 * BLOCK + 1), tenant=TENANT)):
            store.publish(pub)
        with store.snapshot() as snapshot:
            names = [name.hex() for name, _ in snapshot.entries()]
    done = run("export", *names, "--pack", path, "--sign", key, "--kv-cache-dir", tmp_path / "from", "--json").json
    assert (done["signed"], done["tenant"], sorted(done["entries"])) == (True, "", sorted(names))
    return path


@pytest.fixture
def to_kv(tmp_path: Path) -> Path:
    saved(tmp_path / "to", prompt(9, BLOCK))
    return tmp_path / "to"


def blocks(folder: Path) -> int:
    with closing(Store(folder, read_only=True)) as store:
        return int(store.counts()["blocks"])


def notes(folder: Path) -> int:
    with closing(Store(folder, read_only=True)) as store, store.snapshot() as snapshot:
        return sum(note.kind == NoteKind.IMPORTED for note in snapshot.notes())


def use_of(run: Run, pack: Path, to_kv: Path, *more: str) -> tuple[Any, Any, int]:
    done = run("import", pack, *more, "--kv-cache-dir", to_kv, "--json")
    assert done.exit_code == 0, done.stderr
    (file,) = done.json["files"]
    return file["use"], file["signer"], file["num_tokens"]


def allow(line: str) -> None:
    allowed_signers().parent.mkdir(parents=True, exist_ok=True)
    allowed_signers().write_text(line + "\n")


def test_a_signed_pack_is_used_at_once_and_an_unsigned_one_noted(run: Run, pack: Path, key: Path, to_kv: Path) -> None:
    before, num_tokens = blocks(to_kv), len(PROMPT) + 2 * BLOCK + 1
    assert use_of(run, pack, to_kv) == ("once computed", None, num_tokens)
    assert (blocks(to_kv), notes(to_kv)) == (before, 2)
    shown = run("import", pack, "--kv-cache-dir", to_kv, "--dry-run").stdout
    assert "would import 2 prompts with 86 tokens of tiny of tenant " in shown
    assert " (yours) in 7 blocks; no signer whom you trust has signed it" in shown
    assert (blocks(to_kv), notes(to_kv)) == (before, 2)
    allow(f"alice@example.org {public(key)}")
    assert use_of(run, pack, to_kv) == ("at once", "alice@example.org", num_tokens)
    with closing(Store(to_kv, read_only=True)) as store:
        own = str(user_tenant())
        theirs = [entry_of(store, PROMPT, tenant=own), entry_of(store, prompt(2, 2 * BLOCK + 1), tenant=own)]
        assert all(is_whole(store, pub) for pub in theirs)
        with store.snapshot() as snapshot:
            assert not any(
                node.is_unverified for node in map(snapshot.node, [n.name for p in theirs for n in p.nodes]) if node
            )


def test_trust_marks_what_it_brings(run: Run, pack: Path, to_kv: Path) -> None:
    assert use_of(run, pack, to_kv, "--trust")[0] == "unverified"
    with closing(Store(to_kv, read_only=True)) as store, store.snapshot() as snapshot:
        marked = [
            node.is_unverified for node in map(snapshot.node, [key for key, _ in snapshot.records("nodes")]) if node
        ]
    assert sum(marked) == 7
    assert run("verify", "--kv-cache-dir", to_kv).exit_code == 0


def test_a_changed_or_exchanged_signature_vouches_for_nothing(
    run: Run, pack: Path, key: Path, to_kv: Path, tmp_path: Path
) -> None:
    allow(f"alice@example.org {public(key)}")
    header, data = split(pack.read_bytes())
    start, stop = header["signature"]["data_offsets"]
    for number, signature in enumerate((bytes(stop - start), sign_digest(key, DIGEST).ljust(stop - start, b"\0"))):
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(joined(header, data[:start] + signature + data[stop:]))
        assert use_of(run, path, to_kv)[:2] == ("once computed", None)


def test_all_packs_of_a_folder_are_imported(run: Run, pack: Path, to_kv: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tiny.prefixes"
    folder.mkdir()
    run("import", folder, "--kv-cache-dir", to_kv).assert_refused(2, "there is no .safetensors file in this folder")
    for name in ("a", "b"):
        shutil.copy(pack, folder / f"{name}.safetensors")
    done = run("import", folder, "--kv-cache-dir", to_kv, "--dry-run", "--json").json
    assert [Path(file["file"]).name for file in done["files"]] == ["a.safetensors", "b.safetensors"]


def test_what_a_pack_cannot_have_is_named(run: Run, tmp_path: Path, to_kv: Path) -> None:
    with closing(open_store(tmp_path / "from")) as store:
        pictured = PROMPT.copy()
        pictured[20:24] = -7
        pubs = [entry_of(store, pictured), entry_of(store, PROMPT), entry_of(store, PROMPT, layout=entry_layout())]
        for pub in pubs:
            store.publish(pub)
        export_all(store, pubs[:1], tmp_path / "pictured.safetensors")
        names = [pub.last_node.hex() for pub in pubs if pub.last_node is not None]
    of_kv = ("--kv-cache-dir", tmp_path / "from")
    run("export", names[0], "--pack", tmp_path / "p", *of_kv).assert_refused(
        2, "has pictures, which a pack cannot have"
    )
    run("export", *names[1:], "--pack", tmp_path / "p", *of_kv).assert_refused(2, "another model", "a file for each")
    run("export", names[1], "--pack", tmp_path / "p", "-o", tmp_path / "o", *of_kv).assert_refused(
        2, "--output or --pack"
    )
    run("export", names[1], "--pack", tmp_path / "no" / "p", *of_kv).assert_refused(2, "--pack: there is no folder")
    run("import", tmp_path / "pictured.safetensors", "--kv-cache-dir", to_kv).assert_refused(
        2, "cannot be computed again"
    )
    assert not (tmp_path / "p").exists()


def entry_layout() -> str:
    from tests.prefixstore.packs.exported import large_layout

    return large_layout(8 * BLOCK)
