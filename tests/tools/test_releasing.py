"""What `tools/release` refuses, such as a wheel without a part, and the address that it writes into the sources."""

from __future__ import annotations

import hashlib
import json
import tomllib
import zipfile
from pathlib import Path

import pytest

from diskprefix.native import build
from diskprefix.native.library import VARIANTS
from tools.releasing.debian_root import own_sources
from tools.releasing.environment import ReleaseError
from tools.releasing.release import (
    BITS,
    CHANGES,
    LIBRARY,
    LICENCES,
    TARGETS,
    check_parts,
    give_address,
    oldest_system,
    released_version,
    symbol,
)

INFO = "diskprefix-1.0.dist-info"
OPERATORS = b"".join(map(symbol, TARGETS[0].variants))
SAID = f"{CHANGES}\n\n- `--old` is gone.\n- Bits: those of `--rows bf16`.\n\n### Fixed\n\n- A fault.\n"
READY = {
    "diskprefix/version.py": '__version__ = "1.0"\n',
    "CHANGELOG.md": f"## [1.0] - 2026-11-23\n\n{SAID}",
    "README.md": "    pip install diskprefix\n",
}


def wheel(folder: Path, **changes: bytes | None) -> Path:
    """A wheel with the parts that one must have, but for the `changes`, by their last name; None leaves one out."""
    made = {"name": LIBRARY, "hashes": [{"content": hashlib.sha256(OPERATORS).hexdigest()}]}
    listed = {"components": [made, {"name": "marked"}]}
    parts: dict[str, bytes] = {
        LIBRARY: OPERATORS,
        "diskprefix/presets/agent.toml": b"",
        "diskprefix/service_units/diskprefix.service": b"",
        f"{INFO}/METADATA": b"",
        **{f"{INFO}/licenses/{name}": b"" for name in LICENCES},
        f"{INFO}/sboms/diskprefix.cdx.json": json.dumps(listed).encode(),
    }
    path = folder / "diskprefix-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            last = Path(name).name if "/vendored/" in name else Path(name).stem
            changed = changes.get(last, content)
            if changed is not None:
                archive.writestr(name, changed)
    return path


def test_a_wheel_with_all_parts_is_accepted(tmp_path: Path) -> None:
    check_parts(wheel(tmp_path), "1.0", TARGETS[0])


@pytest.mark.parametrize("part", ["_operators", "agent", "METADATA", *(Path(name).name for name in LICENCES)])
def test_a_wheel_without_a_part_is_refused(tmp_path: Path, part: str) -> None:
    with pytest.raises(ReleaseError, match="lacks"):
        check_parts(wheel(tmp_path, **{part: None}), "1.0", TARGETS[0])


def test_a_wheel_whose_list_is_of_another_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match="another digest"):
        check_parts(wheel(tmp_path, _operators=b"others"), "1.0", TARGETS[0])


def test_a_wheel_whose_library_lacks_a_variant_is_refused(tmp_path: Path) -> None:
    assert {name for target in TARGETS for name in target.variants} == {*VARIANTS, "amx"}
    with pytest.raises(ReleaseError, match="neon_i8mm, neon_dot;"):
        check_parts(wheel(tmp_path), "1.0", TARGETS[1])


@pytest.mark.skipif(not build.LIBRARY.exists(), reason="no operators of this CPU")
def test_the_compiled_library_has_the_names_that_are_looked_for() -> None:
    assert symbol("baseline") in build.LIBRARY.read_bytes()
    assert symbol("base") not in build.LIBRARY.read_bytes()


def test_the_oldest_system_is_what_auditwheel_says() -> None:
    assert oldest_system('is consistent\nwith the following\nplatform tag: "manylinux_2_17_aarch64".') == (2, 17)
    with pytest.raises(ReleaseError, match="no platform"):
        oldest_system('the following platform tag: "linux_x86_64".')


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    (tmp_path / "diskprefix").mkdir()
    for name, text in READY.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("diskprefix/version.py", '__version__ = "1.1"\n'),
        ("CHANGELOG.md", f"## [1.0]\n\n{SAID}"),
        ("README.md", "    pip install .\n"),
        ("README.md", "    pip install diskprefix\n\nIt is\nnot on PyPI.\n"),
    ],
)
def test_what_is_not_ready_is_not_published(sources: Path, name: str, text: str) -> None:
    assert released_version(sources, "v1.0") == "1.0"
    (sources / name).write_text(text, encoding="utf-8")
    with pytest.raises(ReleaseError):
        released_version(sources, "v1.0")


@pytest.mark.parametrize("tag", ["vnext", "v1.0.1", "v1"])
def test_another_tag_publishes_nothing(sources: Path, tag: str) -> None:
    with pytest.raises(ReleaseError, match=f"the tag is {tag}, "):
        released_version(sources, tag)


def test_a_trial_needs_a_section_of_the_changelog(sources: Path) -> None:
    (sources / "CHANGELOG.md").write_text(f"## [1.0]\n{SAID}", encoding="utf-8")
    assert released_version(sources) == "1.0"
    (sources / "CHANGELOG.md").write_text(f"## [Unreleased]\n## [1.0.1]\n{SAID}", encoding="utf-8")
    with pytest.raises(ReleaseError, match="no section"):
        released_version(sources)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("1.0", ""),
        ("1.0", f"{CHANGES}\n\n- Nothing.\n"),
        ("1.0", f"{CHANGES}\n\n{BITS}\n"),
        ("1.0", f"### Added\n\n{BITS}none.\n"),
        ("1.0", f"{CHANGES}\n\n### Added\n\n{BITS}none.\n"),
        ("0.9", "- An earlier version lacks it."),
    ],
)
def test_each_version_says_what_can_change_for_its_users(sources: Path, version: str, said: str) -> None:
    sections = {"0.9": SAID, "1.0": SAID, version: said}
    text = "".join(f"## [{number}] - 2026-11-23\n\n{body}\n" for number, body in sorted(sections.items(), reverse=True))
    (sources / "CHANGELOG.md").write_text(f"# Changelog\n\n{text}", encoding="utf-8")
    with pytest.raises(ReleaseError, match=rf"\[{version}\] has no heading"):
        released_version(sources)


def test_links_lead_to_the_project_where_its_address_is_known(sources: Path) -> None:
    page = "![A\npicture](a.svg), [a page](b/README.md#c), [here](#d), [there](https://example.org)"
    (sources / "README.md").write_text(page, encoding="utf-8")
    (sources / "pyproject.toml").write_text('[project]\nname = "x"\n\n[tool.other]\na = 1\n', encoding="utf-8")
    give_address(sources, "https://example.com/o/p", "12ab")
    assert (sources / "README.md").read_text(encoding="utf-8") == (
        "![A\npicture](https://example.com/o/p/raw/12ab/a.svg), "
        "[a page](https://example.com/o/p/blob/12ab/b/README.md#c), [here](#d), [there](https://example.org)"
    )
    written = tomllib.loads((sources / "pyproject.toml").read_text(encoding="utf-8"))
    assert written["project"]["urls"] == {"Source": "https://example.com/o/p"}


@pytest.mark.parametrize(
    ("identity", "listed", "used"),
    [
        ("ID=debian", "# none\ndeb http://example.org/debian bookworm main\n", True),
        ("ID=debian", "# moved to debian.sources\n", False),
        ("ID=ubuntu\nID_LIKE=debian", "deb http://example.org/ubuntu noble main\n", False),
    ],
)
def test_a_root_has_the_sources_of_a_debian_alone(tmp_path: Path, identity: str, listed: str, used: bool) -> None:
    (tmp_path / "etc/apt").mkdir(parents=True)
    (tmp_path / "etc/os-release").write_text(f'NAME="A system"\n{identity}\n', encoding="utf-8")
    (tmp_path / "etc/apt/sources.list").write_text(listed, encoding="utf-8")
    assert own_sources(tmp_path) == [tmp_path / "etc/apt/sources.list"] * used
