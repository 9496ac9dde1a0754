"""`huggingface_hub`, with checks that it lacks: of the answers of a mirror, of their size, and of the files received.

The library takes commits, ETags and file names of the hub for paths: with `../`, a mirror could write any file. It
reads whole answers into memory and writes whole bodies to the disk, however large they are.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from functools import cache
from hashlib import file_digest, sha1
from pathlib import Path
from typing import Any

from diskprefix.printable import shown
from diskprefix.runtime.files.checkpoint import require_inner_path
from diskprefix.units import format_size

COMMIT = re.compile("[0-9a-f]{40}")
_TAG = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
OFFICIAL = "https://huggingface.co"
MAX_ANSWER_BYTES = 256 << 20
"""The limit for the answers of one operation together, without the bodies of files: listings, headers, errors."""
_LEAST_ANSWER_BYTES = 1 << 10
"""An answer counts with at least that many, so that a listing of empty pages ends, too."""
_CHUNK_BYTES = 1 << 20


def checked_library(*, begins: bool = False) -> Any:
    """Returns `huggingface_hub`. `begins`: an operation begins, for which answers and sizes count anew.

    For each file it now raises `ValueError` if its name leads out of the snapshot, if it is of another commit, if its
    ETag is no digest, if its size is not announced or changes, if more bytes are sent than announced, or if its ETag is
    the SHA-256 of other bytes, or git's SHA-1 of them. It does so for answers above `MAX_ANSWER_BYTES`, too.
    """
    import huggingface_hub

    answers = _answers()
    if begins:
        answers.num_bytes = 0
        answers.sizes.clear()
    _choose_transport()
    return huggingface_hub


@cache
def _answers() -> _Answers:
    """Returns the counter of answers. The first call puts the checks into the library."""
    import huggingface_hub
    import huggingface_hub.file_download
    from huggingface_hub.utils import _http

    download: Any = huggingface_hub.file_download
    answers = _Answers()
    # Xet's store of blobs that repositories share has other digests than SHA-256, and `rm` would not free its files.
    download.constants.HF_HUB_DISABLE_SHARED_BLOBS = True
    _check_announcements(download, answers)
    _check_files(download, answers)
    make_client = _http._GLOBAL_CLIENT_FACTORY

    def made() -> Any:
        client = make_client()
        hooks = client.event_hooks
        client.event_hooks = hooks | {"response": [*hooks["response"], answers.limit]}
        return client

    huggingface_hub.set_client_factory(made)
    return answers


class _Answers:
    """Counts of one operation: bytes of answers, once decompressed; sizes of files by repository, commit and name.
    `is_file` says whether the current thread fetches the body of a file, which has its own limit."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.sizes: dict[tuple[str, str, str], int] = {}
        self._thread = threading.local()

    @property
    def is_file(self) -> bool:
        return getattr(self._thread, "is_file", False)

    @is_file.setter
    def is_file(self, value: bool) -> None:
        self._thread.is_file = value

    def limit(self, response: Any) -> None:
        """Limits the body of a response of httpx that has just begun, including a redirect's."""
        if response.request.method == "HEAD" or (self.is_file and response.status_code in (200, 206)):
            return
        read = response.iter_bytes

        def counted(chunk_size: int | None = None) -> Iterator[bytes]:
            self._count(_LEAST_ANSWER_BYTES)
            for chunk in read(chunk_size):
                self._count(len(chunk))
                yield chunk

        response.iter_bytes = counted

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self.num_bytes > MAX_ANSWER_BYTES:
            raise ValueError(f"its answers have more than {format_size(MAX_ANSWER_BYTES)}")


class _BoundedFile:
    """A file to which at most `max_bytes` can be written. `name` describes its content."""

    def __init__(self, file: Any, name: str, max_bytes: int) -> None:
        self._file, self._name, self._max_bytes = file, name, max_bytes

    def write(self, data: bytes) -> int:
        if self._file.tell() + len(data) > self._max_bytes:
            raise ValueError(f"{self._name} was announced with {self._max_bytes} bytes, and more were sent")
        num_bytes: int = self._file.write(data)
        return num_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _check_announcements(download: Any, answers: _Answers) -> None:
    """Checks the announced properties of a file before it is fetched."""
    ask = download._get_metadata_or_catch_error

    def checked(**options: Any) -> Any:
        name, revision = require_inner_path(options["filename"]), options["revision"]
        # Without the folder, a 404 does not create an empty file below the commit that the answer names.
        head = ask(**options | {"storage_folder": None})
        _, tag, commit, size, *_rest = head
        if tag is None:
            return head
        if commit != revision if COMMIT.fullmatch(revision) else not COMMIT.fullmatch(commit):
            raise ValueError(f"the commit of {name} is {shown(commit)!r}, not the one that was asked for")
        if not _TAG.fullmatch(tag):
            raise ValueError(f"the tag of {name} is {shown(tag)!r}, which is no digest")
        if size is None:
            raise ValueError(f"the size of {name} is not announced")
        # Room was made for the first size.
        if (first := answers.sizes.setdefault((options["repo_id"], commit, name), size)) != size:
            raise ValueError(f"{name} was announced with {first} bytes, and then with {size}")
        return head

    download._get_metadata_or_catch_error = checked


def _check_files(download: Any, answers: _Answers) -> None:
    """Limits the bytes of a file, and compares the received content with its ETag, which is the name of the blob."""
    fetch, get, move = download._download_to_tmp_and_move, download.http_get, download._chmod_and_move
    current = threading.local()

    def fetched(**options: Any) -> None:
        current.name = options["filename"]
        fetch(**options)

    def bounded(url: str, temp_file: Any, *, expected_size: int | None = None, **options: Any) -> None:
        if expected_size is None:
            raise ValueError(f"the size of {url} is not announced")
        file, before = _BoundedFile(temp_file, current.name, expected_size), answers.is_file
        answers.is_file = True
        try:
            get(url, file, expected_size=expected_size, **options)
        finally:
            answers.is_file = before

    def compared(incomplete: Path, blob: Path) -> None:
        kind, digest_of = ("SHA-1", _git_digest) if len(blob.name) == 40 else ("SHA-256", _sha256)
        if (digest := digest_of(incomplete)) != blob.name:
            raise ValueError(f"the {kind} of {current.name} is {digest}, not {blob.name} as the hub announced")
        move(incomplete, blob)

    download._download_to_tmp_and_move, download.http_get, download._chmod_and_move = fetched, bounded, compared


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return file_digest(opened, "sha256").hexdigest()


def _git_digest(file: Path) -> str:
    """Returns the name that git gives to a blob: the SHA-1 of its length and content."""
    digest = sha1(b"blob %d\0" % file.stat().st_size, usedforsecurity=False)
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@cache
def _is_xet_off() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_DISABLE_XET)


def _choose_transport() -> None:
    """Turns Xet off for mirrors: it writes files by itself, without a limit that could be set."""
    from huggingface_hub import constants

    constants.HF_HUB_DISABLE_XET = _is_xet_off() or constants.ENDPOINT != OFFICIAL
