"""What holds for the project as a whole: its files, its tools, its words, and that its pages say what the code does."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import diskprefix
from diskprefix.daemon.server.threads import WorkKind
from diskprefix.values import ACCEPTED, SCOPE_WORDS
from tests.exceptions import exceptions
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
    "findings",
    "policies",
    "pyproject.toml",
    "systemd",
    "tests",
    "tools",
}
FINDINGS = sorted((ROOT / "findings").glob("*.sh"))
"""Scripts that show what libraries of the field do, without this project."""
SCRIPTS = [
    ROOT / ".ci/run",
    *sorted(path for path in (*ROOT.glob("tools/*"), *ROOT.glob("tests/*/*")) if path.is_file() and not path.suffix),
    *FINDINGS,
    ROOT / "findings/run",
]
UNFINISHED = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")) + r")\b")


def pyproject() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project


def dependencies() -> set[str]:
    """Returns what the daemon and its tools need. That of an extra within another is there once."""
    extras = pyproject()["optional-dependencies"]
    listed = [*required(), *extras["dev"]]
    names: set[str] = {canonicalize_name(Requirement(line).name) for line in listed}
    return names - {diskprefix.__name__}


def required() -> list[str]:
    """Returns the lines of what all models need together."""
    project = pyproject()
    return [*project["dependencies"], *project["optional-dependencies"]["transformers"]]


def is_ignored(name: str) -> bool:
    patterns = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    return any(fnmatch.fnmatch(name, pattern.strip("/")) for pattern in patterns if pattern)


def text_files() -> Iterator[Path]:
    for top in sorted(TOP_LEVEL - {".git", "LICENSE"}):
        path = ROOT / top
        found = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in found:
            parts = file.relative_to(ROOT).parts
            # Files of others are as they published them.
            if file.is_file() and "vendored" not in parts and not any(map(is_ignored, parts)):
                yield file


def test_the_top_level_holds_what_it_should_and_nothing_else() -> None:
    present = {path.name for path in ROOT.iterdir() if not is_ignored(path.name)}
    assert present - {".git"} == TOP_LEVEL - {".git"}


def test_the_version_is_the_same_everywhere() -> None:
    assert released_version(ROOT) == diskprefix.__version__


def test_each_dependency_has_its_reason_beside_it() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    reasons = dict(re.findall(r'^    "([a-z0-9-]+)[^"]*",  # (.{15,})$', text, flags=re.MULTILINE))
    # Other engines and llama.cpp's library have environments of their own.
    own = {"vllm", "lmcache", "sglang", "llama-cpp-python", diskprefix.__name__}
    assert {canonicalize_name(name) for name in reasons} == dependencies() | own


def test_each_dependency_has_a_known_good_version() -> None:
    lines = (ROOT / "tools/constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    assert dependencies() <= {canonicalize_name(pin.name) for pin in pins}
    assert "torch==2.13.0" in lines
    assert all(re.fullmatch(r"==[0-9.]+", str(pin.specifier)) and not pin.url for pin in pins)


INNER_PARTS = {"huggingface-hub", "lmdb", "torch", "transformers", "uvicorn"}
"""Dependencies of which more is used than they promise: private functions, a class that is extended; and of lmdb the
file format, which a major version may change."""


def test_a_dependency_whose_inner_parts_are_used_is_bounded_to_versions_that_were_tried() -> None:
    lines = (ROOT / "tools/constraints.txt").read_text(encoding="utf-8").splitlines()
    listed = [Requirement(line) for line in lines if not line.startswith("#")]
    pins: dict[str, Requirement] = {canonicalize_name(pin.name): pin for pin in listed}
    needed = [Requirement(line) for line in required()]
    bounds: dict[str, SpecifierSet] = {canonicalize_name(one.name): one.specifier for one in needed}
    for name in INNER_PARTS:
        (tried,) = pins[name].specifier
        assert tried.version in bounds[name]
        major, minor, *_ = map(int, tried.version.split("."))
        later = f"{major + 1}.0" if name == "lmdb" else f"{major}.{minor + 1}"
        assert later not in bounds[name], f"{name} has no upper bound"


FOLDERS = ("diskprefix", "policies", "systemd", "tests", "tools")
PAGES = [
    path
    for path in sorted({ROOT / "README.md", *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))})
    if not any(map(is_ignored, path.relative_to(ROOT).parts))
]


def test_the_front_page_has_at_most_12_kb() -> None:
    assert (ROOT / "README.md").stat().st_size <= 12 * 1024


def test_no_page_installs_from_an_index_before_one_has_the_package() -> None:
    texts = {str(page.relative_to(ROOT)): " ".join(page.read_text(encoding="utf-8").split()) for page in PAGES}
    # With a version, it is what a test of a release types, from a folder.
    installs = re.compile(r"pipx? install diskprefix(?!==|\w)")
    found = [page for page, text in texts.items() if installs.search(text)]
    assert found == [] or "is not on PyPI" not in texts["README.md"]


@pytest.mark.parametrize(
    "page", [*PAGES, *(ROOT / ".github").glob("*.md")], ids=lambda path: str(path.relative_to(ROOT))
)
def test_each_link_of_a_page_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8"))
    local = [(target, section) for target, section in links if "://" not in target]
    assert [target for target, _ in local if not (page.parent / target).exists()] == []
    to_sections = [(page.parent / target if target else page, section) for target, section in local if section]
    assert [(str(to), section) for to, section in to_sections if section not in sections(to)] == []


@cache
def sections(page: Path) -> set[str]:
    """Returns the names by which links lead to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    texts = [re.sub(r"\]\([^)]*\)", "]", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in texts}


PIN = re.compile(r"(?P<name>@?[\w/-]+?)(?:==|@)(?P<version>[0-9.]+)")
"""A package and its version, as pip or npm takes them."""


@pytest.mark.parametrize("script", FINDINGS, ids=lambda path: path.name)
def test_a_finding_needs_nothing_of_this_project_and_leaves_nothing(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    assert diskprefix.__name__ not in text
    assert re.search(r"^folder=\"\$\(mktemp -d\)\"\ntrap 'rm -rf \"\$folder\"' EXIT$", text, re.MULTILINE)
    of_pip = re.findall(r"\bpip install (?:--\S+ )*(.+)$", text, re.MULTILINE)
    of_npm = re.findall(r"^npm install --prefix=\"\$folder\" (?:--\S+ )*(.+)$", text, re.MULTILINE)
    assert of_pip
    assert len(of_npm) == text.count("npm install")
    pins = {one: PIN.fullmatch(one) for line in (*of_pip, *of_npm) for one in line.split()}
    assert [one for one, pin in pins.items() if pin is None] == []
    # The first line of the comment names the library with the version that is installed.
    name, version = text.splitlines()[1].removeprefix("# ").replace(":", " ").split()[:2]
    assert (name, version) in {(pin["name"], pin["version"]) for pin in pins.values() if pin}
    assert bool(of_npm) == bool(re.search(r"^# Needs Node \d+ or later\. ", text, re.MULTILINE))
    assert re.search(r"^# (?:.*)\bExpected: ", text, re.MULTILINE)
    assert re.search(r"^# Seen on \d{4}-\d\d-\d\d", text, re.MULTILINE)
    assert re.search(r"^# (?:.*)Exits with 1 if that changes\.$", text, re.MULTILINE)


def test_the_page_of_findings_has_one_line_for_each_with_its_versions() -> None:
    page = (ROOT / "findings/README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[([\w-]+)\]\(([\w-]+\.sh)\) \| (.+?) \| .+ \|$", page, re.MULTILINE)
    assert [file for _, file, _ in rows] == [path.name for path in FINDINGS]
    for name, file, libraries in rows:
        text = (ROOT / "findings" / file).read_text(encoding="utf-8")
        versions = [library.removesuffix(" on npm").split(" ") for library in libraries.split(", ")]
        pinned = [f"{one}=={version}" in text or f"{one}@{version}" in text for one, version in versions]
        assert (name, all(pinned)) == (file.removesuffix(".sh"), True)


def run_findings(folder: Path, *names: str) -> subprocess.CompletedProcess[str]:
    """Runs `findings/run` of a folder, with no other programs than those of the base system."""
    command = [str(folder / "run"), *names]
    return subprocess.run(command, capture_output=True, text=True, env={"PATH": str(folder / "bin")}, check=False)


def test_findings_run_says_of_each_whether_it_passed_changed_or_could_not_run(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    # Without node and npm, wherever this machine has them.
    for program in ("bash", "cat", "dirname", "grep", "mktemp", "python3", "rm", "sed", "timeout"):
        found = shutil.which(program)
        assert found
        (tmp_path / "bin" / program).symlink_to(found)
    (tmp_path / "run").symlink_to(ROOT / "findings/run")
    for name, line in {"fine": "exit 0", "gone": "echo other; exit 3", "node": "npm install one@1.0"}.items():
        (tmp_path / f"{name}.sh").write_text(f"#!{shutil.which('bash')}\n{line}\n", encoding="utf-8")
        (tmp_path / f"{name}.sh").chmod(0o755)
    every = run_findings(tmp_path)
    assert re.sub(r"\d+ s\b", "N s", every.stdout).splitlines() == [
        "fine  passed  N s",
        "gone  changed (exit 3)  N s",
        "node  not run: no node",
        "1 passed, 1 changed, 1 not run",
    ]
    assert (every.stderr, every.returncode) == ("    other\n", 1)
    some = run_findings(tmp_path, "fine", "node.sh")
    assert (some.stdout.splitlines()[-1], some.returncode) == ("1 passed, 0 changed, 1 not run", 0)
    assert run_findings(tmp_path, "absent").returncode == 2
    assert "usage: findings/run" in run_findings(tmp_path, "--help").stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_executable_strict_and_well_formed(script: Path) -> None:
    lines = script.read_text(encoding="utf-8").splitlines()
    assert os.access(script, os.X_OK)
    assert lines[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in lines
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_continuous_integration_runs_what_a_developer_runs() -> None:
    assert '\ntools/test "$@" && exit\n' in (ROOT / ".ci/run").read_text(encoding="utf-8")


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


# The names of files, of what is in them, and of threads that the pages mention: they exist.

CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w./-]*\w\.(py|md|cpp|h|js|service|socket|timer)")
NAME = re.compile(r"([A-Za-z_]\w*\.)*(?P<last>[A-Z]\w*[a-z]\w*|[A-Z][A-Z0-9_]{3,})(\(\))?")
"""A class, perhaps with its module, or a constant."""
MEMBER = re.compile(r"(?:\w+\.)*(?P<of>[A-Z]\w*[a-z]\w*)\.(?P<member>[a-z_]\w*)(?:\(\))?")
"""A method or an attribute of a class."""
CLASSES_OF_OTHERS = {"CPUOffloadingSpec"}
IN_FILE = re.compile(r"`([A-Za-z_]\w*)`(?: and `([A-Za-z_]\w*)`)? in\s+`([\w./-]+\.py)`")
THREAD_IN_SOURCE = re.compile(
    r"""(?:Thread\(.*name=f?|thread_name_prefix=|(?:ThreadPool|standing_thread|start_helper)\(.*, )"([a-z-]+?)-?["{]"""
)
COMMAND_THREADS = {"verify", "kv-loader", "kv-saver", "kv-fetch", "kv-open", "remote-prefetch"}
"""Threads of commands and of vLLM's processes, which the daemon has not."""


@cache
def sources() -> dict[str, str]:
    return {
        str(file.relative_to(ROOT)): file.read_text(encoding="utf-8", errors="replace")
        for file in text_files()
        if file.suffix != ".md" and file.stat().st_size < 1 << 20
    }


@cache
def words() -> frozenset[str]:
    return frozenset(word for text in sources().values() for word in re.findall(r"\w+", text))


def files_named(name: str, page: Path) -> list[Path]:
    """Returns the files that a page may mean by `name`: a path from the page's folder, or the end of any path."""
    beside = (page.parent / name).resolve()
    paths = [*map(ROOT.joinpath, sources()), *PAGES]
    return [path for path in paths if path == beside or f"/{path}".endswith(f"/{name.removeprefix('../')}")]


@cache
def has_member(of: str, member: str) -> bool:
    """Returns whether a file that defines the class `of` has the word `member`."""
    texts = [text for text in sources().values() if re.search(rf"^ *class {of}\b", text, re.MULTILINE)]
    return of in CLASSES_OF_OTHERS or any(re.search(rf"\b{member}\b", text) for text in texts)


def wrong_names(page: Path) -> Iterator[str]:
    """Yields the names on a page that nothing has."""
    text = page.read_text(encoding="utf-8")
    for code in CODE.findall(text):
        if FILE.fullmatch(code) and not files_named(code, page):
            yield code
        name, member = NAME.fullmatch(code), MEMBER.fullmatch(code)
        if (name and name["last"] not in words()) or (member and not has_member(**member.groupdict())):
            yield code
    for first, second, file in IN_FILE.findall(text):
        held = {word for path in files_named(file, page) for word in re.findall(r"\w+", path.read_text("utf-8"))}
        yield from (f"{name} in {file}" for name in (first, second) if name and name not in held)


def threads() -> set[str]:
    found = {
        name
        for path, text in sources().items()
        if path.startswith("diskprefix/")
        for name in THREAD_IN_SOURCE.findall(text)
    }
    return (found | set(get_args(WorkKind))) - COMMAND_THREADS


@pytest.mark.cases(3)
@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_file_class_member_and_constant_that_a_page_names_exists(page: Path) -> None:
    assert list(wrong_names(page)) == []


def test_the_page_on_threads_lists_those_of_the_daemon() -> None:
    page = (ROOT / "diskprefix/README.md").read_text(encoding="utf-8")
    [table] = re.findall(r"\| thread \| .*\n\| --- .*\n((?:\|.*\n)+)", page)
    listed = {name for row in table.splitlines() for name in CODE.findall(row.split("|")[1])}
    assert listed == threads()


NAMES_SCOPES = [
    "",
    "README.md",
    "policies/README.md",
    "systemd/diskprefix.env",
    *(
        f"diskprefix/{name}"
        for name in (
            *(
                "TOUR.md",
                "daemon/server/README.md",
                "prefixstore/cache/README.md",
                "prefixstore/store_options.py",
            ),
            "daemon/api/fields.py",
        )
    ),
    *exceptions("NAME_SCOPES"),
]
"""The places that say which scopes there are; "" is the error message."""


@pytest.mark.parametrize("path", NAMES_SCOPES)
def test_each_scope_word_is_named_where_users_look(path: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8") if path else ACCEPTED
    # To warm a prompt with the scope off would do nothing.
    wanted = {word.text.format("N") for word in SCOPE_WORDS.values()} - ({"off"} if "warm" in path else set())
    quote = "`" if path.endswith(".md") else ""
    patterns = {word: r"(?<!:)\bN\b" if word == "N" else rf"{quote}\b{word}\b{quote}" for word in wanted}
    assert [word for word, pattern in patterns.items() if not re.search(pattern, text)] == []
