"""The OCI image: a Debian root and the wheel, without a daemon of containers and without a registry of images.

mmdebstrap makes the root, pip installs the wheel in it, and umoci writes the image.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from msgspec import Struct

from tools.releasing.debian_root import DebianRoot, make_archive, require_programs
from tools.releasing.environment import CONSTRAINTS, ReleaseError, run

SUITE = "bookworm"
_NAME = "diskprefix"
"""The image's name where `podman load` puts it."""
_PACKAGES = ("ca-certificates", "python3", "python3-venv")
_INSTALLED = ("opt/diskprefix", "var/cache/diskprefix", "etc/passwd", "etc/group", "etc/shadow", "etc/gshadow")
"""What the second layer has: the installation, the folder of the volume, and the user."""


class Config(Struct, frozen=True):
    """The description of an image's containers. `user` is `UID:GID`."""

    variables: dict[str, str]
    user: str
    volume: str
    port: str
    signal: str
    entrypoint: list[str]
    command: list[str]

    def options(self) -> Iterator[str]:
        """Yields the options of `umoci config`."""
        for name, value in self.variables.items():
            yield f"--config.env={name}={value}"
        yield f"--config.user={self.user}"
        yield f"--config.volume={self.volume}"
        yield f"--config.exposedports={self.port}/tcp"
        yield f"--config.stopsignal={self.signal}"
        yield from (f"--config.entrypoint={word}" for word in self.entrypoint)
        yield from (f"--config.cmd={word}" for word in self.command)


_VOLUME = "/var/cache/diskprefix"
CONFIG = Config(
    variables={
        "PATH": "/opt/diskprefix/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        # Store, models and the caches of pip and of the model hub: all that is written. Without a volume there, the log
        # says what is lost.
        "XDG_CACHE_HOME": "/var/cache",
        "HF_HOME": f"{_VOLUME}/huggingface",
        "PIP_CACHE_DIR": f"{_VOLUME}/pip",
        "DISKPREFIX_HOST": "0.0.0.0",
        "DISKPREFIX_VOLUME": _VOLUME,
    },
    # A number, so that a cluster can see that it is not root.
    user="8642:8642",
    volume=_VOLUME,
    port="8642",
    signal="SIGTERM",
    entrypoint=["diskprefix"],
    command=["serve"],
)
"""A container serves as a user of its own, with a root file system that may be read-only."""


def require_image_programs() -> None:
    """Raises `ReleaseError` if no image can be made here."""
    require_programs()
    if shutil.which("umoci") is None:
        raise ReleaseError("umoci is not installed; Debian has it")


def make_image(wheel: Path, version: str, machine: str, work: Path, made_at: str) -> Path:
    """Returns an archive of an image with a wheel. `made_at` are seconds since 1970, as text. `work` is empty."""
    variables = {"SOURCE_DATE_EPOCH": made_at}
    base, layer = work / "base.tar", work / "layer.tar"
    make_archive(base, SUITE, packages=_PACKAGES, variables=variables)
    shutil.copy(wheel, work)
    shutil.copy(CONSTRAINTS, work)
    root = DebianRoot(base, work / "root", {work: "/mnt"})
    uid, _, gid = CONFIG.user.partition(":")
    pip = "/opt/diskprefix/bin/pip install --no-cache-dir --disable-pip-version-check --constraint"
    for command in (
        "python3 -m venv /opt/diskprefix",
        f"{pip} /mnt/{CONSTRAINTS.name} /mnt/{wheel.name}",
        f"groupadd --gid {gid} diskprefix",
        f"useradd --uid {uid} --gid {gid} --no-create-home --shell /usr/sbin/nologin diskprefix",
        f"install --directory --owner={uid} --group={gid} --mode=0700 {CONFIG.volume}",
    ):
        root.call(command, variables, work / "log")
    pack(root.folder, [name for name in _INSTALLED if (root.folder / name).exists()], layer, made_at)
    archive = work / f"diskprefix-{version}-{machine}.oci.tar"
    write_image(archive, version, {base: f"Debian {SUITE}", layer: wheel.name}, CONFIG, made_at)
    return archive


def pack(folder: Path, names: Sequence[str], archive: Path, made_at: str, *options: str) -> None:
    """Writes the same archive whenever files below a folder have the same content, whatever their times."""
    alike = ("--sort=name", f"--mtime=@{made_at}", "--numeric-owner", *options)
    run("tar", "--create", "--file", archive, *alike, "--directory", folder, *names)


def write_image(archive: Path, version: str, layers: Mapping[Path, str], config: Config, made_at: str) -> None:
    """Writes an archive in OCI's layout with an image of `layers`, each with a line that says what it is."""
    when = datetime.fromtimestamp(int(made_at), UTC).isoformat()
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        layout = Path(folder, "layout")
        image = f"{layout}:{_NAME}"
        run("umoci", "init", "--layout", layout)
        run("umoci", "new", "--image", image)
        for layer, said in layers.items():
            history = (f"--history.created={when}", f"--history.created_by={said}")
            run("umoci", "raw", "add-layer", "--image", image, *history, layer)
        label = f"--config.label=org.opencontainers.image.version={version}"
        run("umoci", "config", "--image", image, f"--created={when}", "--no-history", label, *config.options())
        run("umoci", "gc", "--layout", layout)
        pack(layout, ("blobs", "index.json", "oci-layout"), archive, made_at, "--owner=0", "--group=0")
