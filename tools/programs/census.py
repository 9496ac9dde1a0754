"""The size of the code: lines by package, names that are used twice, the longest pages, settings and threads.

A line of code holds a token that is neither a comment nor a docstring. Docstrings are those of modules, classes and
functions, and the strings that follow a field or a constant.
"""

from __future__ import annotations

import ast
import io
import json
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from diskprefix.settings import Settings
from tools.measuring.options import JSON
from tools.measuring.report import new_table, print_report, say

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "diskprefix"
EXTRAS = "extras"
OTHER_SUFFIXES = {"C++": (".cpp", ".h", ".hpp", ".inc"), "web": (".js", ".css", ".html")}
COLUMNS = ("lines", "code", "docstring", "comment", "blank", "modules", "classes")
NUM_PAGES = 10
_IGNORED = {tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}


def lines_of(source: str) -> Counter[str]:
    """Returns how many lines of a Python source are code, docstring, comment and blank. They add up to `lines`."""
    docstrings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in _IGNORED:
            code.update(range(token.start[0], token.end[0] + 1))
    code -= docstrings
    comments -= code
    num_lines = source.count("\n")
    return Counter(
        lines=num_lines,
        code=len(code),
        docstring=len(docstrings),
        comment=len(comments),
        blank=num_lines - len(code) - len(docstrings) - len(comments),
    )


def python_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def packages_of(folder: Path) -> dict[str, Counter[str]]:
    """Returns the counts of each package, by its name. The files of the uppermost folder are `.`; each extra is one."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for file in python_files(folder):
        source, parts = file.read_text(encoding="utf-8"), file.relative_to(folder).parts[:-1]
        name = "/".join(parts[:2] if parts[:1] == (EXTRAS,) else parts[:1]) or "."
        classes = sum(isinstance(node, ast.ClassDef) for node in ast.walk(ast.parse(source)))
        found[name] += lines_of(source) + Counter(modules=1, classes=classes)
    return dict(sorted(found.items()))


def doubled(names: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Returns the names that stand for several things, with the files of each. Takes pairs of a name and a file."""
    places: dict[str, list[str]] = defaultdict(list)
    for name, file in names:
        places[name].append(file)
    return {name: files for name, files in sorted(places.items()) if len(files) > 1}


def class_names() -> Iterable[tuple[str, str]]:
    for file in python_files(PACKAGE):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                yield node.name, str(file.relative_to(PACKAGE))


def file_names() -> Iterable[tuple[str, str]]:
    for file in python_files(PACKAGE):
        if not file.stem.startswith("__"):
            yield file.stem, str(file.relative_to(PACKAGE))


def threads() -> list[str]:
    """Returns the names that the package gives to its threads and pools. A part that is computed is shown as `{}`."""
    found = set()
    for file in python_files(PACKAGE):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("Thread", "ThreadPoolExecutor")):
                found |= {_text_of(key.value) for key in node.keywords if key.arg in ("name", "thread_name_prefix")}
    return sorted(found)


def _text_of(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return str(node.value) if isinstance(node, ast.Constant) else "{}"


def pages() -> dict[str, int]:
    """Returns the bytes of the longest pages of the project."""
    tracked = [file for folder in (".", "*", "*/*", "*/*/*") for file in ROOT.glob(f"{folder}/*.md")]
    sizes = {str(file.relative_to(ROOT)): file.stat().st_size for file in tracked if file.name != "CHANGELOG.md"}
    own = {name: size for name, size in sizes.items() if not name.startswith((".", "tools/prompts"))}
    return dict(sorted(own.items(), key=lambda item: -item[1])[:NUM_PAGES])


def num_options() -> int:
    """Returns the options of `diskprefix serve`."""
    from diskprefix.cli.serve_command import serve

    return sum(isinstance(parameter, click.Option) for parameter in serve.params)


def other_lines(suffixes: tuple[str, ...]) -> int:
    files = [file for file in PACKAGE.rglob("*") if file.suffix in suffixes]
    return sum(file.read_text(encoding="utf-8").count("\n") for file in files)


def request_path(way: Mapping[str, Any] | None) -> dict[str, int] | None:
    return None if way is None else {key: way[key] for key in ("num_files", "num_lines", "num_stays")} | way["returns"]


def report_of(way: Mapping[str, Any] | None) -> dict[str, Any]:
    packages = packages_of(PACKAGE)
    total = sum(packages.values(), Counter())
    other = {name: other_lines(suffixes) for name, suffixes in OTHER_SUFFIXES.items()}
    extras = sum(counts["lines"] for name, counts in packages.items() if name.startswith(EXTRAS))
    return {
        "packages": packages,
        "total": total,
        "other_lines": other,
        "core_lines": total["lines"] - extras + sum(other.values()),
        "all_lines": total["lines"] + sum(other.values()),
        "beside": {name: sum(packages_of(ROOT / name).values(), Counter()) for name in ("tests", "tools")},
        "doubled_classes": doubled(class_names()),
        "doubled_files": doubled(file_names()),
        "pages": pages(),
        "num_settings": len(fields(Settings)),
        "num_options": num_options(),
        "threads": threads(),
        "request_path": request_path(way),
    }


def show(report: dict[str, Any], console: Console) -> None:
    table = new_table("Python by package", left=("package",), right=COLUMNS)
    rows = {**report["packages"], "diskprefix": report["total"], **report["beside"]}
    for name, counts in rows.items():
        table.add_row(name, *(str(counts[column]) for column in COLUMNS))
    console.print(table)
    others = ", ".join(f"{name} {count}" for name, count in report["other_lines"].items())
    say(console, f"with other languages ({others}): {report['all_lines']} lines; the core: {report['core_lines']}")
    for kind in ("classes", "files"):
        found = report[f"doubled_{kind}"]
        say(console, f"doubled {kind}: {len(found)} ({', '.join(found) or 'none'})")
    say(console, f"settings: {report['num_settings']}, options of serve: {report['num_options']}")
    say(console, f"threads: {len(report['threads'])} ({', '.join(report['threads'])})")
    say(console, "longest pages, bytes: " + ", ".join(f"{name} {size}" for name, size in report["pages"].items()))
    if report["request_path"]:
        say(console, "request path: " + ", ".join(f"{name} {count}" for name, count in report["request_path"].items()))


@click.command()
@click.option(
    "--way", type=click.File(encoding="utf-8"), help="What `tools/bench way --json` printed, to show the request path."
)
@JSON
def main(way: Any, as_json: bool) -> None:
    """Count the code: lines, classes, doubled names, pages, settings, threads."""
    print_report(report_of(None if way is None else json.load(way)), as_json, show)
