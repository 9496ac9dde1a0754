"""What is derived from the key that machines share."""

from __future__ import annotations

from pathlib import Path

import pytest

from diskprefix.errors import SettingsError
from diskprefix.namespace_key import NamespaceKey

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
    "content", [b"", b"too short", b" " * 100, b"x" * 5000], ids=["empty", "short", "blank", "long"]
)
def test_a_file_without_a_secret_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(SettingsError, match=r"--namespace-key-file: .*must hold 16 to 4096 bytes"):
        NamespaceKey.read(file)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--namespace-key-file: cannot read .*: No such file"):
        NamespaceKey.read(tmp_path / "none")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o666])
def test_a_file_that_others_can_read_or_write_is_refused_with_what_to_do(mode: int, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(SECRET)
    file.chmod(mode)
    with pytest.raises(SettingsError, match=r"--namespace-key-file: others may .*; run `chmod 600` on it"):
        NamespaceKey.read(file)
