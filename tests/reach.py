"""Which tests a change reaches, by what files import and name, the nearest first.

`tools/test --guards MODULE` prints the files of tests that reach a module, with the number of imports between them.
`tools/test --changed` runs the files of tests that the changes since `main` reach, whole, until `FITS_S` have passed.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FITS_S = 480.0
"""For so many seconds tests of a change are begun."""
UNFIT = "did not fit"
"""What is said of a test that was not begun."""


def files_named(source: str, modules: Mapping[str, str]) -> Iterator[str]:
    """Yields the files of the modules that a source imports or whose names stand in its strings, as of a command.
    `modules` has the file of each dotted name."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found = [name.name for name in names]
            case ast.ImportFrom(module=str(base), names=names, level=0):
                found = [f"{base}.{name.name}" for name in names]
            case ast.Constant(value=str(text)) if text.endswith(".py"):
                # A program that is started by its file. No two files of the package have one name.
                found = [name for name in modules if name.rpartition(".")[2] == Path(text).stem]
            case ast.Constant(value=str(text)) if re.fullmatch(r"[a-z_]+(\.\w+)+(:\w+)?", text):
                bare = text.partition(":")[0]
                found = [name for name in (bare, f"diskprefix.{bare}") if name in modules]
            case _:
                continue
        # `from a.b import c` is about the module a.b.c where there is one, else about a.b.
        for name in found:
            if file := modules.get(name) or modules.get(name.rpartition(".")[0]):
                yield file


def module_of(file: str) -> str:
    """`tests/faults/__init__.py` → `tests.faults`."""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def imports(root: Path = ROOT) -> dict[str, set[str]]:
    """Returns the files that each Python file of the project imports. Paths are relative to `root`."""
    files = [path for name in ("diskprefix", "tests", "tools") for path in sorted((root / name).rglob("*.py"))]
    sources = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in files}
    modules = {module_of(file): file for file in sources}
    return {file: {*files_named(source, modules)} - {file} for file, source in sources.items()}


def is_of_tests(file: str) -> bool:
    return re.fullmatch(r"tests/(.*/)?test_\w+\.py", file) is not None


def distances(changed: Iterable[str], imports: Mapping[str, set[str]], root: Path = ROOT) -> dict[str, int]:
    """Returns the number of imports from each file of tests to the nearest of the changed files. The nearest come
    first, of these the ones in the most similar folder. What is no Python is reached by the tests that name it, and
    less closely by those of its folder."""
    changed = [*changed]
    importers = defaultdict[str, set[str]](set)
    for file, imported in imports.items():
        for other in imported:
            importers[other].add(file)
    tests = [*filter(is_of_tests, imports)]
    at, reached = set(changed), dict[str, int]()
    for file in at - imports.keys():
        # A name that many files have says nothing without its folder.
        name = file if Path(file).stem in ("README", file.rpartition("/")[2]) else Path(file).name
        importers[file] = {test for test in tests if name in (root / test).read_text(encoding="utf-8")}
        folders = [parent.as_posix() for parent in Path(file.removeprefix("diskprefix/")).parents][:-1]
        beside = ({test for test in tests if test.startswith(f"tests/{folder}/")} for folder in folders)
        if of_folder := next(filter(None, beside), set()):
            importers[file].add(f"{file}/")
            importers[f"{file}/"] = of_folder
    # These are run for what lies below them; no way leads through them, which would make all tests near.
    for file in at:
        below = f"{Path(file).parent.as_posix()}/"
        if Path(file).name == "conftest.py":
            importers[file] |= {test for test in imports if test.startswith(below)}
        if Path(file).name == "__init__.py":
            importers[file] |= {one for one, of in imports.items() if any(other.startswith(below) for other in of)}
    distance = 0
    while at:
        reached |= dict.fromkeys(at, distance)
        at = set().union(*(importers[file] for file in at)) - reached.keys()
        distance += 1

    def far(test: str) -> tuple[int, int, str]:
        return reached[test], -max(shared_folders(test, file) for file in changed), test

    return {test: reached[test] for test in sorted(filter(is_of_tests, reached), key=far)}


def shared_folders(test: str, file: str) -> int:
    """Returns in how many of its folders a file of the package agrees with one of tests."""
    own, other = Path(test).parts[1:-1], Path(file).parts[1:-1]
    return next((n for n, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), min(len(own), len(other)))


def changed_since(commit: str, root: Path = ROOT) -> list[str]:
    """Returns the files that differ from where the checkout left `commit`, untracked ones too."""

    def git(*arguments: str) -> list[str]:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()

    [base] = git("merge-base", commit, "HEAD")
    return [*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")]


def take_start(config: pytest.Config) -> None:
    """Notes when the run began, for all its processes, and finds the tests that it is about."""
    if config.option.since:
        config.option.began_at = time.monotonic()
        config.option.reached = distances(changed_since(config.option.since), imports())


def keep_reached(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests that the changes reach, the nearest first."""
    reached: dict[str, int] = config.option.reached
    files = {item: item.path.relative_to(ROOT).as_posix() for item in items}
    place = {file: number for number, file in enumerate(reached)}
    items[:] = sorted((item for item in items if files[item] in place), key=lambda item: place[files[item]])


def skip_unfit(config: pytest.Config) -> None:
    """Skips what would begin too late."""
    if config.option.since and time.monotonic() - config.option.began_at > FITS_S:
        pytest.skip(UNFIT)


def main() -> None:
    """Prints the tests that guard the modules that are named, by path or with dots."""
    known = imports()
    modules = {module_of(file): file for file in known}
    for name in sys.argv[1:]:
        dotted = module_of(Path(name).as_posix())
        file = modules.get(dotted) or modules.get(f"diskprefix.{dotted}") or name
        if not (ROOT / file).exists():
            sys.exit(f"no file {name}")
        for test, number in distances([file], known).items():
            print(f"{number:2}  {test}")


if __name__ == "__main__":
    main()
