"""What holds for the project as a whole: its files, its tools, and that its pages say what the code does."""

from __future__ import annotations

import fnmatch
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import diskprefix
from tools.releasing.release import released_version

ROOT = Path(__file__).parent.parent
TOP_LEVEL = {
    ".ci",
    ".git",
    ".github",
    ".gitignore",
    "CHANGELOG.md",
    "LICENSE",
    "README.md",
    "diskprefix",
    "policies",
    "pyproject.toml",
    "systemd",
    "tests",
    "tools",
}
SCRIPTS = [ROOT / ".ci/run", *sorted(path for path in (ROOT / "tools").iterdir() if path.is_file() and not path.suffix)]
UNFINISHED = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")) + r")\b")


def pyproject() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project


def dependencies() -> set[str]:
    project = pyproject()
    extras = project["optional-dependencies"]
    listed = [*project["dependencies"], *extras["dev"]]
    return {canonicalize_name(Requirement(line).name) for line in listed}


def is_ignored(name: str) -> bool:
    patterns = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    return any(fnmatch.fnmatch(name, pattern.strip("/")) for pattern in patterns if pattern)


def text_files() -> Iterator[Path]:
    for top in sorted(TOP_LEVEL - {".git", "LICENSE"}):
        path = ROOT / top
        found = [path] if path.is_file() else sorted(path.rglob("*"))
        yield from (file for file in found if file.is_file() and not any(map(is_ignored, file.relative_to(ROOT).parts)))


def test_the_top_level_holds_what_it_should_and_nothing_else() -> None:
    present = {path.name for path in ROOT.iterdir() if not is_ignored(path.name)}
    assert present - {".git"} == TOP_LEVEL - {".git"}


def test_the_version_is_the_same_everywhere() -> None:
    assert released_version(ROOT) == diskprefix.__version__


def test_each_dependency_has_its_reason_beside_it() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    reasons = dict(re.findall(r'^    "([a-z0-9-]+)[^"]*",  # (.{15,})$', text, flags=re.MULTILINE))
    # vLLM has an environment of its own, and chooses torch itself.
    assert {canonicalize_name(name) for name in reasons} == dependencies() | {"vllm"}


def test_each_dependency_has_a_known_good_version() -> None:
    lines = (ROOT / "tools/constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    assert dependencies() <= {canonicalize_name(pin.name) for pin in pins}
    assert "torch==2.13.0" in lines
    assert all(re.fullmatch(r"==[0-9.]+", str(pin.specifier)) and not pin.url for pin in pins)


INNER_PARTS = {"huggingface-hub", "lmdb", "torch", "transformers", "uvicorn"}
"""Dependencies of which more is used than they promise: private functions, a class that is extended, a file format."""


def test_a_dependency_whose_inner_parts_are_used_is_bounded_to_versions_that_were_tried() -> None:
    lines = (ROOT / "tools/constraints.txt").read_text(encoding="utf-8").splitlines()
    pins: dict[str, Requirement] = {canonicalize_name(pin.name): pin for pin in map(Requirement, lines[3:])}
    needed = [Requirement(line) for line in pyproject()["dependencies"]]
    bounds: dict[str, SpecifierSet] = {canonicalize_name(one.name): one.specifier for one in needed}
    for name in INNER_PARTS:
        (tried,) = pins[name].specifier
        assert tried.version in bounds[name]
        assert f"{int(tried.version.split('.')[0]) + 1}.0" not in bounds[name], f"{name} has no upper bound"


PAGES = [
    path
    for path in sorted([*ROOT.rglob("README.md"), ROOT / "tests/RELIABILITY.md"])
    if not any(map(is_ignored, path.relative_to(ROOT).parts))
]
EXPECTED_PAGES = {
    "tests/RELIABILITY.md",
    "diskprefix/extras/README.md",
    "diskprefix/api/README.md",
    *("README.md", "systemd/README.md", "tools/README.md", "tests/README.md", "policies/README.md"),
    *("diskprefix/README.md", "diskprefix/cli/README.md", "diskprefix/server/README.md", "diskprefix/chat/README.md"),
    *(
        "diskprefix/engine/README.md",
        "diskprefix/model/README.md",
        "diskprefix/model/quants/README.md",
        "diskprefix/kv/README.md",
        "diskprefix/native/README.md",
        "diskprefix/extras/vllm/README.md",
    ),
    *("diskprefix/store/README.md", "diskprefix/store/codec/README.md", "diskprefix/cache/README.md"),
    *(
        "diskprefix/extras/clients/README.md",
        "diskprefix/extras/compression/README.md",
        "diskprefix/extras/embedding/README.md",
        "diskprefix/extras/exchange/README.md",
        "diskprefix/extras/front/README.md",
        "diskprefix/extras/remote/README.md",
        "diskprefix/extras/watch/dashboard/README.md",
    ),
    *(
        "diskprefix/extras/simulate/README.md",
        "diskprefix/chat/output/README.md",
    ),
}


def test_each_package_has_its_page() -> None:
    assert {str(path.relative_to(ROOT)) for path in PAGES} == EXPECTED_PAGES


def test_no_page_installs_from_an_index_before_one_has_the_package() -> None:
    texts = {str(page.relative_to(ROOT)): " ".join(page.read_text(encoding="utf-8").split()) for page in PAGES}
    if "No index has the package yet" in texts["README.md"]:
        # With a version, it is what a test of a release types, from a folder.
        installs = re.compile(r"pipx? install diskprefix(?!==|\w)")
        assert [page for page, text in texts.items() if installs.search(text)] == []


def test_the_first_page_is_short() -> None:
    assert (ROOT / "README.md").stat().st_size <= 12 * 1024


@pytest.mark.parametrize(
    "page", [*PAGES, *(ROOT / ".github").glob("*.md")], ids=lambda path: str(path.relative_to(ROOT))
)
def test_each_link_of_a_page_leads_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    relative = [target for target in targets if "://" not in target]
    assert [target for target in relative if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_executable_strict_and_well_formed(script: Path) -> None:
    lines = script.read_text(encoding="utf-8").splitlines()
    assert os.access(script, os.X_OK)
    assert lines[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in lines
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_continuous_integration_runs_what_a_developer_runs() -> None:
    assert (ROOT / ".ci/run").read_text(encoding="utf-8").rstrip().endswith('exec tools/test "$@"')


@pytest.mark.parametrize("workflow", sorted((ROOT / ".github/workflows").iterdir()), ids=lambda path: path.name)
def test_a_workflow_pins_its_actions_and_its_rights(workflow: Path) -> None:
    text = workflow.read_text(encoding="utf-8")
    used = re.findall(r"uses: (?!\./)(.+)", text)
    assert used
    assert [line for line in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[0-9.]+", line)] == []
    assert all("--require-hashes" in line for line in re.findall(r"(?<!uv )pip install .+", text))
    parsed = yaml.safe_load(text)
    assert parsed["permissions"] == {"contents": "read"}
    writing = {name for name, job in parsed["jobs"].items() if "write" in job.get("permissions", {}).values()}
    assert writing == ({"attest", "publish", "publish-image"} if workflow.stem == "release" else set())


def test_nothing_is_left_for_later() -> None:
    unfinished = [
        str(path.relative_to(ROOT)) for path in text_files() if UNFINISHED.search(path.read_text("utf-8", "replace"))
    ]
    assert unfinished == []


def test_the_license_is_the_one_that_the_project_declares() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert pyproject()["license"] == "Apache-2.0"
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
