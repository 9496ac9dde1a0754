"""Signatures of packs, by OpenSSH: its keys, its agent and its file of allowed signers are those that people have.

`ssh-keygen` signs a line with the digest of a pack (-Y sign) and verifies it (-Y verify).
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diskprefix.errors import SettingsError
from diskprefix.folders import config_home
from diskprefix.printable import shown
from diskprefix.private_file import read_trusted

MAX_SIGNATURE_BYTES = 4096
_MAX_SIGNERS_BYTES = 1 << 20
_NAMESPACE = "diskprefix"
"""What the signature is for; a signature of the same text for another purpose is none."""
_LIMIT_S = 300.0
"""The seconds in which a key's passphrase can be typed or its token touched."""


def allowed_signers() -> Path:
    """Returns the file that names the signers whom this user trusts, in OpenSSH's form, which may not exist."""
    return config_home() / "allowed_signers"


def sign_digest(key: Path, digest: str) -> bytes:
    """Returns the signature of a pack by the private (or, with an agent, public) key in a file. Raises
    `SettingsError`."""
    if not key.is_file():
        raise SettingsError(f"--sign: {key}: no such file; `ssh-keygen -t ed25519` makes a key")
    done = _run("-Y", "sign", "-n", _NAMESPACE, "-f", str(key), text=_line(digest))
    if done.returncode or len(done.stdout) > MAX_SIGNATURE_BYTES:
        raise SettingsError(f"--sign: {key}: ssh-keygen did not sign: {_said(done)}")
    return done.stdout


def signer_of(signature: bytes, digest: str, signers: Path) -> str | None:
    """Returns who signed a pack, as the file of allowed `signers` calls them; None without a signature, or one that is
    not valid or of nobody there. Raises `SettingsError` if there is no `ssh-keygen`, or if others may write the
    file: they would decide whom this user trusts."""
    if not signature or not signers.is_file():
        return None
    trusted = read_trusted("allowed signers", signers, _MAX_SIGNERS_BYTES)
    if len(trusted) > _MAX_SIGNERS_BYTES:
        raise SettingsError(f"allowed signers: {signers} has more than {_MAX_SIGNERS_BYTES >> 20} MiB")
    with _holding(signature) as file, _holding(trusted) as signers_file:
        of_file = ("-s", file, "-f", signers_file)
        principals = _run("-Y", "find-principals", *of_file, text=b"")
        for name in principals.stdout.decode(errors="replace").splitlines() if not principals.returncode else ():
            verified = _run("-Y", "verify", "-n", _NAMESPACE, "-I", name, *of_file, text=_line(digest))
            if not verified.returncode:
                return name
    return None


@contextmanager
def _holding(content: bytes) -> Iterator[str]:
    """Yields the name of a file with this content, which only this user may read."""
    with tempfile.NamedTemporaryFile(prefix="diskprefix-") as file:
        file.write(content)
        file.flush()
        yield file.name


def _line(digest: str) -> bytes:
    return f"diskprefix pack sha256:{digest}\n".encode()


def _run(*arguments: str, text: bytes) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            ["ssh-keygen", *arguments], input=text, capture_output=True, check=False, timeout=_LIMIT_S
        )
    except FileNotFoundError as error:
        raise SettingsError("there is no ssh-keygen, which signs and verifies packs; install OpenSSH") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SettingsError(f"ssh-keygen failed: {shown(str(error))}") from error


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return shown(lines[-1] if lines else "it said nothing", 200)
