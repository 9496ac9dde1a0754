"""The OCI image: a Debian root and the wheel, without a daemon of containers and without a registry of images.

mmdebstrap makes the root, pip installs the wheel in it, and umoci writes the image. What a container runs, as whom, and
where its volume is, is read from `systemd/Containerfile`, so images that others build with it are used alike.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from msgspec import Struct

from tools.releasing.debian_root import DebianRoot, make_archive, require_programs
from tools.releasing.environment import CONSTRAINTS, ROOT, ReleaseError, run

CONTAINERFILE = ROOT / "systemd/Containerfile"
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


def instructions(text: str) -> list[tuple[str, str]]:
    """Returns the instructions of a container file with their arguments; lines that go on are joined."""
    lines = [line for line in text.split("\n") if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    steps = [line.partition(" ") for line in map(str.strip, joined.split("\n")) if line]
    return [(instruction, arguments.strip()) for instruction, _, arguments in steps]


def config_of(text: str) -> Config:
    """Returns what a container file says of its containers."""
    said = dict(instructions(text))
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    variables = dict(pair.split("=", 1) for pair in said["ENV"].split())
    return Config(
        variables=variables | {"PATH": variables["PATH"].replace("$PATH", path), "LANG": "C.UTF-8"},
        user=said["USER"],
        volume=said["VOLUME"],
        port=said["EXPOSE"],
        signal=said["STOPSIGNAL"],
        entrypoint=json.loads(said["ENTRYPOINT"]),
        command=json.loads(said["CMD"]),
    )


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
    config = config_of(CONTAINERFILE.read_text(encoding="utf-8"))
    root = DebianRoot(base, work / "root", {work: "/mnt"})
    uid, _, gid = config.user.partition(":")
    pip = "/opt/diskprefix/bin/pip install --no-cache-dir --disable-pip-version-check --constraint"
    for command in (
        "python3 -m venv /opt/diskprefix",
        f"{pip} /mnt/{CONSTRAINTS.name} /mnt/{wheel.name}",
        f"groupadd --gid {gid} diskprefix",
        f"useradd --uid {uid} --gid {gid} --no-create-home --shell /usr/sbin/nologin diskprefix",
        f"install --directory --owner={uid} --group={gid} --mode=0700 {config.volume}",
    ):
        root.call(command, variables, work / "log")
    pack(root.folder, [name for name in _INSTALLED if (root.folder / name).exists()], layer, made_at)
    archive = work / f"diskprefix-{version}-{machine}.oci.tar"
    write_image(archive, version, {base: f"Debian {SUITE}", layer: wheel.name}, config, made_at)
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
