"""What `tools/release` refuses: a version that the tag does not name, wheels for newer systems or without a part."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import pytest

from tools.releasing.environment import ReleaseError
from tools.releasing.release import LIBRARY, check_parts, oldest_system, released_version

INFO = "diskprefix-1.0.dist-info"


def wheel(folder: Path, **changes: bytes | None) -> Path:
    """A wheel with the parts that one must have, but for the `changes`, by their last name; None leaves one out."""
    listed = {"components": [{"hashes": [{"content": hashlib.sha256(b"operators").hexdigest()}]}]}
    parts: dict[str, bytes] = {
        LIBRARY: b"operators",
        "diskprefix/presets/agent.toml": b"",
        "diskprefix/units/diskprefix.service": b"",
        f"{INFO}/METADATA": b"",
        f"{INFO}/licenses/LICENSE": b"",
        f"{INFO}/sboms/diskprefix.cdx.json": json.dumps(listed).encode(),
    }
    path = folder / "diskprefix-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            changed = changes.get(Path(name).stem, content)
            if changed is not None:
                archive.writestr(name, changed)
    return path


def test_a_wheel_with_all_parts_is_accepted(tmp_path: Path) -> None:
    check_parts(wheel(tmp_path), "1.0")


@pytest.mark.parametrize("part", ["_operators", "agent", "diskprefix", "LICENSE", "METADATA"])
def test_a_wheel_without_a_part_is_refused(tmp_path: Path, part: str) -> None:
    with pytest.raises(ReleaseError, match="lacks"):
        check_parts(wheel(tmp_path, **{part: None}), "1.0")


def test_a_wheel_whose_list_is_of_another_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match="another digest"):
        check_parts(wheel(tmp_path, _operators=b"others"), "1.0")


def test_the_oldest_system_is_what_auditwheel_says() -> None:
    assert oldest_system('is consistent\nwith the following\nplatform tag: "manylinux_2_17_aarch64".') == (2, 17)
    with pytest.raises(ReleaseError, match="no platform"):
        oldest_system('the following platform tag: "linux_x86_64".')


@pytest.mark.parametrize(("tags", "changelog"), [(["v1.1"], "## [1.0]"), ([], "## [Unreleased]")])
def test_a_version_without_its_tag_or_its_changes_is_refused(tmp_path: Path, tags: list[str], changelog: str) -> None:
    (tmp_path / "diskprefix").mkdir()
    (tmp_path / "diskprefix/version.py").write_text('__version__ = "1.0"\n', encoding="utf-8")
    (tmp_path / "CHANGELOG.md").write_text("## [1.0] - 2026-11-23\n", encoding="utf-8")
    assert released_version(tmp_path, ["v1.0", "green"]) == "1.0"
    (tmp_path / "CHANGELOG.md").write_text(changelog, encoding="utf-8")
    with pytest.raises(ReleaseError):
        released_version(tmp_path, tags)
