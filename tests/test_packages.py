"""Who may import whom, and which library: checked on the syntax tree of every module."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "diskprefix"

BELOW: dict[str, frozenset[str]] = {}
"""For each package, those that it may import: all in the rows before its own, but not its neighbours."""
for _row in (
    "errors printable progress version",
    "tokens settings tenant cache_report",
    "prompt memo",
    "policy store kv",
    "cache_options",
    "model prefix_cache",
    "engine chat simulate",
    "server session",
    "app",
):
    BELOW |= dict.fromkeys(_row.split(), frozenset(BELOW))
BELOW["cli"] = frozenset(BELOW)
BELOW["__main__"] = frozenset({"cli"})
BELOW["__init__"] = frozenset({"session", "version"})

ONLY_IMPORTERS = {"xxhash": {"tokens"}, "lmdb": {"store"}, "zstandard": {"store"}}
WITHOUT_TORCH = {
    "errors",
    "settings",
    "tokens",
    "cache_report",
    "cache_options",
    "tenant",
    "prompt",
    "memo",
    "printable",
}
WITHOUT_TORCH |= {"policy", "store", "simulate"}
TORCH_LIBRARIES = {"torch", "transformers", "accelerate", "safetensors"}


def package_of(module: Path) -> str:
    """`diskprefix/store/codec.py` → `store`, `diskprefix/tokens.py` → `tokens`."""
    return module.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_names(source: str) -> Iterator[str]:
    """Dotted names of all imports, those inside functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=str(base), names=names, level=0):
                yield from (f"{base}.{name.name}" for name in names)
            case ast.ImportFrom(level=level):
                yield "." * level
            case ast.Call(func=ast.Name(id="import_module") | ast.Attribute(attr="import_module"), args=[first, *_]):
                yield str(first.value) if isinstance(first, ast.Constant) else "a computed name"


def violations(package: str, source: str) -> list[str]:
    found = []
    for name in imported_names(source):
        top, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if top == "":
            found.append(f"{package} uses a relative import")
        elif top == "diskprefix" and target in BELOW and target not in BELOW[package] | {package}:
            found.append(f"{package} imports {target}")
        elif package not in ONLY_IMPORTERS.get(top, {package}) or (package in WITHOUT_TORCH and top in TORCH_LIBRARIES):
            found.append(f"{package} imports {top}")
    return found


@pytest.mark.parametrize("module", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_packages_below_its_own(module: Path) -> None:
    assert package_of(module) in BELOW, "a new package: give it its place in BELOW"
    assert violations(package_of(module), module.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("package", "source", "violation"),
    [
        ("store", "import torch", "store imports torch"),
        ("policy", "from transformers import AutoTokenizer", "policy imports transformers"),
        ("policy", "def f():\n    import torch.nn", "policy imports torch"),
        ("policy", "from diskprefix.store.schema import Kind", "policy imports store"),
        ("kv", "from diskprefix import prefix_cache", "kv imports prefix_cache"),
        ("engine", "import diskprefix.server.app", "engine imports server"),
        ("errors", "from diskprefix.settings import Settings", "errors imports settings"),
        ("tokens", "if TYPE_CHECKING:\n    from diskprefix.engine.request import Usage", "tokens imports engine"),
        ("store", "import xxhash", "store imports xxhash"),
        ("server", "import lmdb", "server imports lmdb"),
        ("prefix_cache", "from zstandard import ZstdError", "prefix_cache imports zstandard"),
        ("engine", "from importlib import import_module\nimport_module('lmdb')", "engine imports lmdb"),
        ("server", "from .errors import reply", "server uses a relative import"),
        ("server", "from diskprefix.session import PrefixCacheSession", "server imports session"),
        ("session", "import diskprefix.server.app", "session imports server"),
        ("simulate", "from diskprefix.engine.request import Usage", "simulate imports engine"),
        ("simulate", "import torch", "simulate imports torch"),
        ("engine", "from diskprefix.simulate.trace import Trace", "engine imports simulate"),
        ("prefix_cache", "from diskprefix.simulate.store import Rank", "prefix_cache imports simulate"),
        ("policy", "from diskprefix.cache_options import CacheOptions", "policy imports cache_options"),
        ("__init__", "from diskprefix.engine.engine import Engine", "__init__ imports engine"),
    ],
)
def test_the_checker_catches(package: str, source: str, violation: str) -> None:
    assert violations(package, source) == [violation]


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("cli", "from diskprefix.store.store import Store"),
        ("server", "from diskprefix.version import __version__\nfrom diskprefix.policy.scope import Scope"),
        ("tokens", "import xxhash\nfrom diskprefix.errors import StoreCorrupt"),
        ("store", "import lmdb\nfrom diskprefix.store import schema"),
        ("kv", "import torch"),
        ("simulate", "from diskprefix.prefix_cache.matching import Matcher"),
        ("prefix_cache", "from diskprefix.cache_options import CacheOptions"),
    ],
)
def test_the_checker_allows(package: str, source: str) -> None:
    assert violations(package, source) == []


@pytest.mark.parametrize(
    "module",
    [
        "diskprefix",
        "diskprefix.cli",
        "diskprefix.cli.inspect",
        "diskprefix.cli.simulate",
        "diskprefix.cli.warm",
        "diskprefix.prefix_cache.matching",
        "diskprefix.prefix_cache.nodes",
        "diskprefix.prefix_cache.planning",
        "diskprefix.prefix_cache.recording",
        "diskprefix.prefix_cache.cost_model",
        "diskprefix.simulate.formats",
        "diskprefix.simulate.simulator",
        "diskprefix.simulate.synthetic",
    ],
)
def test_the_command_line_and_what_simulates_start_without_torch(module: str) -> None:
    code = f"import {module}, sys; print(*sorted({{'torch', 'transformers', 'uvicorn'}} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == []
