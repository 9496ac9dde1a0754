"""The form of records in the file: as they are, or sealed with the key of `--kv-cache-encryption-key-file`.

`Snapshot` and `Changes` translate each key and each value with a `RecordForm`. Nothing else reads or writes records,
but for compaction, which copies them as they stand in the file. `sealed_records` has the cryptography, and is imported
only if there is a key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from diskprefix.errors import SettingsError, StoreUnavailable
from diskprefix.private_file import read_private
from diskprefix.store.schema import KEY_BYTES, plain_codes

_FLAG = "--kv-cache-encryption-key-file"


class RecordForm(Protocol):
    """The form in which keys and values stand in the file. For any thread. `database` is that of the
    record."""

    verifies_pieces: bool
    """Whether `opened_piece` returns a piece only if it is what was sealed, so that it needs no checksum."""

    def stored_key(self, database: str, key: bytes) -> bytes: ...

    def plain_key(self, database: str, stored: bytes) -> bytes: ...

    def sealer(self) -> Callable[[str, bytes, bytes | bytearray], bytes | bytearray]:
        """Returns what seals the values of one transaction, given database, key and value."""

    def opened(self, database: str, key: bytes, stored: memoryview | bytes) -> memoryview | bytes:
        """Returns a value; empty if it is not what was sealed under this key. A decoder refuses an empty record, so a
        damaged one does not end a walk over all."""

    def opened_piece(self, key: bytes, stored: memoryview) -> memoryview:
        """As `opened`, of the database `payloads`. The view is valid until the thread opens the next piece."""

    def legible(self, database: str, stored: memoryview | bytes) -> memoryview | bytes:
        """Returns at least the checksum and the `schema.CLEAR_BYTES` of a value, without decrypting or verifying it.
        What is encrypted is zero."""

    def codes(self, beginning: bytes, token_ids: bytes) -> bytes:
        """Returns what stands for token ids in a key of `children`: 4 bytes each. Two sequences behind one beginning
        have as many codes in common as tokens, or, with a probability of 2⁻³², more."""


class PlainRecords:
    """Records as they are."""

    verifies_pieces = False

    def stored_key(self, _database: str, key: bytes) -> bytes:
        return key

    def plain_key(self, _database: str, stored: bytes) -> bytes:
        return stored

    def sealer(self) -> Callable[[str, bytes, bytes | bytearray], bytes | bytearray]:
        return lambda _database, _key, value: value

    def opened(self, _database: str, _key: bytes, stored: memoryview | bytes) -> memoryview | bytes:
        return stored

    def opened_piece(self, _key: bytes, stored: memoryview) -> memoryview:
        return stored

    def legible(self, _database: str, stored: memoryview | bytes) -> memoryview | bytes:
        return stored

    codes = staticmethod(plain_codes)


PLAIN = PlainRecords()


@dataclass(frozen=True)
class EncryptionKey:
    """The content of a key file: 32 bytes."""

    secret: bytes = field(repr=False)

    @classmethod
    def read(cls, path: Path | None) -> EncryptionKey | None:
        """Reads a key file, if there is one.

        Raises `SettingsError`, also if other users may read the file.
        """
        if path is None:
            return None
        secret = read_private(_FLAG, path, KEY_BYTES)
        if len(secret) != KEY_BYTES:
            raise SettingsError(
                f"{_FLAG}: {path} must hold exactly {KEY_BYTES} random bytes; write them with: "
                f"(umask 077; head -c {KEY_BYTES} /dev/urandom > {path})"
            )
        return cls(secret)


def new_form(key: EncryptionKey | None) -> tuple[bytes | None, RecordForm]:
    """Returns what a new store remembers of its key, None if it has none, and the form of its records."""
    if key is None:
        return None, PLAIN
    from diskprefix.store.sealed_records import SealedRecords

    form = SealedRecords.new(key.secret)
    return form.remembered, form


def form_of(path: Path, remembered: bytes | None, key: EncryptionKey | None) -> RecordForm:
    """Returns the form of the records of a store that remembers this of its key. Raises `StoreUnavailable`, which names
    `path`, if `key` is not that key."""
    problem = ""
    if remembered is None and key is not None:
        problem = f"it is not encrypted; leave {_FLAG} out"
    elif remembered is not None and key is None:
        problem = f"it is encrypted; give its key with {_FLAG}"
    elif remembered is not None and key is not None:
        from diskprefix.store.sealed_records import SealedRecords

        if (form := SealedRecords.open(key.secret, remembered)) is not None:
            return form
        problem = f"it is encrypted with another key; give that one with {_FLAG}"
    if problem:
        raise StoreUnavailable(f"{path}: {problem}, or choose another --kv-cache-dir")
    return PLAIN
