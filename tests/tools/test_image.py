"""The OCI image of `tools/release`: what it says of its containers, and its layers."""

from __future__ import annotations

import json
import re
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from diskprefix.file_system import VOLUME
from diskprefix.folders import default_kv_cache_dir
from tests.closing import needs
from tools.releasing.environment import ReleaseError
from tools.releasing.image import CONFIG, pack, write_image

MADE_AT = "1700000000"


def test_a_container_serves_as_a_user_that_is_not_root_and_keeps_its_cache_in_the_volume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (CONFIG.entrypoint, CONFIG.command) == (["diskprefix"], ["serve"])
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", CONFIG.user), "a number, so that a cluster can see that it is not root"
    assert CONFIG.variables[VOLUME] == CONFIG.volume
    for name in ("HF_HOME", "PIP_CACHE_DIR"):
        assert CONFIG.variables[name].startswith(f"{CONFIG.volume}/")
    for name, value in CONFIG.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CACHE_DIRECTORY", raising=False)
    assert default_kv_cache_dir() == Path(CONFIG.volume, "kv")


def written(folder: Path) -> Path:
    """An image of two layers, of which the second changes a file of the first."""
    layers = dict[Path, str]()
    for name, content in (("base", "of Debian"), ("layer", "of the wheel")):
        (folder / name / "etc").mkdir(parents=True)
        (folder / name / "etc/passwd").write_text(content, encoding="utf-8")
        pack(folder / name, ["etc"], folder / f"{name}.tar", MADE_AT)
        layers[folder / f"{name}.tar"] = f"the {name}"
    write_image(folder / "image.tar", "1.0", layers, CONFIG, MADE_AT)
    return folder / "image.tar"


def in_image(image: Path, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the manifest of the only image in an archive, and its configuration."""
    with tarfile.open(image) as archive:
        archive.extractall(folder, filter="data")

    def read(descriptor: dict[str, Any]) -> dict[str, Any]:
        kind, _, digest = descriptor["digest"].partition(":")
        content: dict[str, Any] = json.loads((folder / "blobs" / kind / digest).read_bytes())
        return content

    [only] = json.loads((folder / "index.json").read_bytes())["manifests"]
    assert only["annotations"]["org.opencontainers.image.ref.name"] == "diskprefix"
    manifest = read(only)
    return manifest, read(manifest["config"])


@needs("umoci")
def test_the_image_says_what_its_containers_run(tmp_path: Path) -> None:
    manifest, image = in_image(written(tmp_path), tmp_path / "read")
    said = image["config"]
    assert (said["Entrypoint"], said["Cmd"], said["User"]) == (["diskprefix"], ["serve"], "8642:8642")
    assert (said["Volumes"], said["ExposedPorts"]) == ({"/var/cache/diskprefix": {}}, {"8642/tcp": {}})
    assert dict(pair.split("=", 1) for pair in said["Env"]) == CONFIG.variables
    assert (said["StopSignal"], said["Labels"]) == ("SIGTERM", {"org.opencontainers.image.version": "1.0"})
    assert image["created"].startswith("2023-11-14T22:13:20")
    assert [line["created_by"] for line in image["history"]] == ["the base", "the layer"]
    assert len(manifest["layers"]) == 2
    blobs = [path for path in (tmp_path / "read/blobs").rglob("*") if path.is_file()]
    assert len(blobs) == 4, "nothing else is left in it"


@needs("umoci")
def test_the_same_layers_make_the_same_image_whenever_it_is_made(tmp_path: Path) -> None:
    images = [written(tmp_path / name).read_bytes() for name in ("one", "another")]
    assert images[0] == images[1]


@needs("umoci")
def test_a_container_sees_what_the_last_layer_has(tmp_path: Path) -> None:
    image = written(tmp_path)
    in_image(image, tmp_path / "read")
    command = ["umoci", "unpack", "--rootless", "--image", f"{tmp_path / 'read'}:diskprefix", str(tmp_path / "bundle")]
    subprocess.run(command, check=True, capture_output=True)
    assert (tmp_path / "bundle/rootfs/etc/passwd").read_text(encoding="utf-8") == "of the wheel"
    process = json.loads((tmp_path / "bundle/config.json").read_bytes())["process"]
    assert process["args"] == ["diskprefix", "serve"]
    assert (process["user"]["uid"], process["user"]["gid"]) == (8642, 8642)


@needs("umoci")
def test_what_umoci_refuses_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match=r"^umoci failed: .*no such file"):
        write_image(tmp_path / "image.tar", "1.0", {tmp_path / "none.tar": "none"}, CONFIG, MADE_AT)
