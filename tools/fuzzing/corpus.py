"""The corpus: for each target an archive of inputs. Git has few small ones of each."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).parent / "corpus"
MOST_BYTES = 200_000
"""The size of all archives together."""
_MOST_OF_ONE = 8_000
_FOUND = "found-"
"""The beginning of the names of inputs that once failed. They are kept."""
_TIME = (1980, 1, 1, 0, 0, 0)


def archive_of(target: str) -> Path:
    return FOLDER / f"{target}_seed_corpus.zip"


def inputs_of(target: str) -> dict[str, bytes]:
    """Returns a target's inputs in git, by name."""
    if not archive_of(target).exists():
        return {}
    with zipfile.ZipFile(archive_of(target)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write_inputs(folder: Path, inputs: Iterable[bytes]) -> Path:
    """Writes inputs into a folder, each under its digest. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for content in inputs:
        (folder / hashlib.sha256(content).hexdigest()[:16]).write_bytes(content)
    return folder


def keep(target: str, merged: Path) -> int:
    """Rewrites the archive of a target: the inputs that once failed, and as many of the smallest inputs in `merged` as
    fit.

    Returns its size in bytes.
    """
    chosen = {name: content for name, content in inputs_of(target).items() if name.startswith(_FOUND)}
    left = _MOST_OF_ONE - sum(map(len, chosen.values()))
    for path in sorted(merged.iterdir(), key=lambda path: (path.stat().st_size, path.name)):
        left -= path.stat().st_size + 110
        if left < 0:
            break
        chosen[path.name[:8]] = path.read_bytes()
    write_archive(target, chosen)
    return archive_of(target).stat().st_size


def write_archive(target: str, inputs: dict[str, bytes]) -> None:
    """Writes the archive of a target. Equal inputs give equal bytes."""
    FOLDER.mkdir(exist_ok=True)
    with zipfile.ZipFile(archive_of(target), "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in sorted(inputs.items()):
            archive.writestr(zipfile.ZipInfo(name, _TIME), content, zipfile.ZIP_DEFLATED)
