"""Modules import only what is below them, and never in a circle. Checked on the syntax tree of every module."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from diskprefix.daemon.cli import commands
from tests.exceptions import exceptions

PACKAGE = Path(__file__).parent.parent / "diskprefix"
MODULES = sorted(PACKAGE.rglob("*.py"))

BELOW: dict[str, frozenset[str]] = {}
"""For each room, those that it may import: all in the rows before its own, but not its neighbours."""
for _row in (
    "control_groups errors fair_cache file_system gguf_types identity daemon.json_values daemon.rooms nearest",
    "printable processors progress staging thread_pool version",
    "daemon.origins folders thread_work units",
    "private_file setting tenant_ids tokens",
    "values",
    "scope",
    "prefixstore.store_options",
    "prefixstore.namespace_key memo native user_key kernel_settings",
    "model_identity runtime.runtime_options prefixstore.store",
    "daemon.settings prefixstore.kv prefixstore.state_identity",
    "prefixstore.cache.tiers",
    "prefixstore.recording prefixstore.remote",
    "runtime prefixstore.cache",
    "prefixstore.packs prefixstore.prefix_store prefixstore.shared_store runtime.grid runtime.llama",
    "prefixstore.chunk_store prefixstore.simulate runtime.choose_runtime",
    "daemon.hooks",
    "daemon.engine daemon.chat",
    "runtime.library daemon.api daemon.compression",
    "daemon.catalogue.built_in_names",
    "daemon.server",
    "daemon.app",
    "daemon.cli",
    "daemon.catalogue",
    "daemon.embedding daemon.infill",
    "daemon.ollama",
    "daemon.router",
    "desk",
    "bridges",
):
    BELOW |= dict.fromkeys(_row.split(), frozenset(BELOW))
BELOW["__main__"] = frozenset({"daemon.cli"})
BELOW["daemon.app"] |= {"daemon.router"}  # Its door alone, which opens for several models.
BELOW["prefixstore"] = BELOW["daemon.engine"]  # The names of its library, each on its first use.
BELOW["__init__"] = frozenset({"runtime.library", "version"})  # The library, on its first use.
for _house in ("daemon", "prefixstore", "runtime"):
    BELOW.setdefault(_house, frozenset())  # Of what stands in no room.
BELOW_LAYERS = {
    "prefixstore.cache.policy": BELOW["prefixstore.store"],
    "prefixstore.cache.tiers": BELOW["daemon.hooks"],
}

HOUSES = ("desk", "bridges")
"""Their rooms import no other than `shared`: each can be taken away."""

SPINE = ("writer", "evictor", "changes", "environment", "store_file", "snapshot", "save", "eviction", "schema")
"""The modules on the way of a save to the disk. They know nothing of the statistics that are kept beside."""

LAYERS = (
    "prefixstore.store.codec",
    "prefixstore.store",
    "prefixstore.cache.policy",
    "prefixstore.cache.tiers",
    "prefixstore.cache",
)
"""Parts of one package: a module of one part imports its own part and the parts before it."""

ONLY_IMPORTERS = {
    "xxhash": {"tokens"},
    "lmdb": {"prefixstore.store"},
    "zstandard": {"prefixstore.store"},
    "obstore": {"prefixstore.remote"},
}
WITHOUT_TORCH = {
    "errors",
    "identity",
    "daemon.settings",
    "prefixstore.namespace_key",
    "user_key",
    "values",
    "tenant_ids",
    "tokens",
    "memo",
    "printable",
    "units",
}
WITHOUT_TORCH |= {
    "native",
    "prefixstore.store",
    "prefixstore.kv",
    "daemon.hooks",
    "prefixstore.cache",
    "daemon.chat",
    "daemon.api",
    "daemon.server",
}
TORCH_LIBRARIES = {"torch", "transformers", "accelerate", "safetensors"}

WITH_FOREIGN_NAMES = {
    *(
        "runtime.library.library_model",
        "runtime.grid.state_layout",
        "runtime.grid.uncached",
        "runtime.files.gguf.file_processor",
    ),
    *("runtime.fetch.hub", "runtime.files.kinds", "runtime.fetch.hub_library"),
    *exceptions("FOREIGN_NAMES"),
}
"""The modules of the grid, of pictures, of libraries, of the hub and of bridges: they alone use what other packages
keep to themselves. The way of a plan imports no transformers."""
OF_PYTHON = {"_asdict", "_exit", "_fields", "_fields_", "_make", "_replace"}


def name_of(module: Path) -> str:
    """`diskprefix/prefixstore/store/codec/planes.py` → `store.codec.planes`, `diskprefix/prefixstore/store/__init__.py`
    → `store`."""
    parts = module.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def package_of(name: str) -> str:
    """Returns the room of a module, or the first part of its name."""
    rooms = (room for room in BELOW if f"{name}.".startswith(f"{room}."))
    return max(rooms, key=len, default=name.partition(".")[0])


def layer_of(name: str) -> str | None:
    return max((layer for layer in LAYERS if f"{name}.".startswith(f"{layer}.")), key=len, default=None)


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


SOURCES = {name_of(module): module.read_text(encoding="utf-8") for module in MODULES}


def violations(module: str, source: str) -> list[str]:
    package, layer, found = package_of(module), layer_of(module) or "", list[str]()
    below = BELOW_LAYERS.get(layer, BELOW[package])
    for name in imported_names(source):
        top, _, rest = name.partition(".")
        target = package_of(rest)
        if top == "":
            found.append(f"{module} uses a relative import")
        elif top == "diskprefix" and target in BELOW and target not in below | {package}:
            found.append(f"{module} imports {target}")
        elif top == "diskprefix" and target == package and package in HOUSES and not is_beside(module, rest):
            found.append(f"{module} imports {rest}")
        elif top == "diskprefix" and is_upward(module, rest):
            found.append(f"{module} imports {layer_of(rest)}")
        elif package not in ONLY_IMPORTERS.get(top, {package}) or (package in WITHOUT_TORCH and top in TORCH_LIBRARIES):
            found.append(f"{module} imports {top}")
    return found


def is_beside(module: str, imported: str) -> bool:
    own, other = module.split(".")[1], imported.split(".")[1]
    return other in (own, "shared")


def is_upward(module: str, imported: str) -> bool:
    own, other = layer_of(module), layer_of(imported)
    if own is None or other is None:
        return False
    return LAYERS.index(other) > LAYERS.index(own)


def imports_of(sources: Mapping[str, str]) -> dict[str, set[str]]:
    imports: dict[str, set[str]] = {}
    for module, source in sources.items():
        names = (name.removeprefix("diskprefix.") for name in imported_names(source))
        # `from a.b import c` is about the module a.b.c where there is one, else about a.b.
        found = (name if name in sources else name.rpartition(".")[0] for name in names)
        imports[module] = {name for name in found if name in sources} - {module}
    return imports


def circles(imports: Mapping[str, set[str]]) -> set[tuple[str, ...]]:
    """The groups of modules of which each imports every other one, directly or by others."""
    reached = {module: reachable(module, imports) for module in imports}
    groups = {tuple(sorted(other for other in reached[module] if module in reached[other])) for module in imports}
    return groups - {()}


def reachable(start: str, imports: Mapping[str, set[str]]) -> set[str]:
    """All modules that are imported when `start` is; `start` itself only if it lies in a circle."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        new = imports[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


def test_the_tables_name_modules_and_rooms_that_there_are() -> None:
    """Else a rule about one would be a rule about nothing."""
    named = {*BELOW, *BELOW_LAYERS, *LAYERS, *WITHOUT_TORCH, *WITH_FOREIGN_NAMES}.union(*ONLY_IMPORTERS.values())
    rooms = {".".join(name.split(".")[:length]) for name in SOURCES for length in range(1, 5)}
    assert {name for name in named if package_of(name) not in HOUSES} - rooms == set()


def test_a_module_imports_only_what_is_below_it() -> None:
    """All of them in each run: a sample would let one through, which others then find."""
    assert {package_of(module) for module in SOURCES} <= BELOW.keys(), "a new package: give it its place in BELOW"
    assert [violation for module, source in SOURCES.items() for violation in violations(module, source)] == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles(imports_of(SOURCES)) == set()


@pytest.mark.parametrize(
    ("module", "source", "violation"),
    [
        ("prefixstore.store", "import torch", "prefixstore.store imports torch"),
        (
            "prefixstore.cache.policy",
            "from transformers import AutoTokenizer",
            "prefixstore.cache.policy imports transformers",
        ),
        (
            "prefixstore.cache.policy.select",
            "from diskprefix.prefixstore.store.schema import NodeKind",
            "prefixstore.cache.policy.select imports prefixstore.store",
        ),
        (
            "tokens",
            "if TYPE_CHECKING:\n    from diskprefix.daemon.engine.request import Usage",
            "tokens imports daemon.engine",
        ),
        ("daemon.engine", "from importlib import import_module\nimport_module('lmdb')", "daemon.engine imports lmdb"),
        ("daemon.server", "from .errors import reply", "daemon.server uses a relative import"),
        (
            "desk.warm.warm_prompts",
            "from diskprefix.desk.watch.browse.flat import X",
            "desk.warm.warm_prompts imports desk.watch.browse.flat.X",
        ),
        (
            "prefixstore.store.codec.planes",
            "from diskprefix.prefixstore.store.schema import NodeKind",
            "prefixstore.store.codec.planes imports prefixstore.store",
        ),
    ],
)
def test_the_checker_catches(module: str, source: str, violation: str) -> None:
    assert violations(module, source) == [violation]


@pytest.mark.parametrize("module", SPINE)
def test_the_way_of_a_save_knows_no_statistics(module: str) -> None:
    source = (PACKAGE / f"prefixstore/store/{module}.py").read_text(encoding="utf-8")
    assert not [name for name in imported_names(source) if name.startswith("diskprefix.prefixstore.store.statistics")]


def test_a_circle_is_found() -> None:
    """Also one that is inside a function."""
    two = {"a.b": "import diskprefix.a.c", "a.c": "from diskprefix.a.b import X", "d": "import diskprefix.a.b"}
    assert circles(imports_of(two)) == {("a.b", "a.c")}
    three = {"a": "from diskprefix import b", "b": "def f():\n    import diskprefix.c.d", "c": "import diskprefix.a"}
    assert circles(imports_of(three | {"c.d": "import diskprefix.c"})) == {("a", "b", "c", "c.d")}


OF_COMMANDS = (
    "daemon.app",
    "daemon.cli",
    "daemon.catalogue.catalogue",
    *sorted({target.partition(":")[0].removeprefix("diskprefix.") for target in commands().values()}),
    "prefixstore.recording.recording",
    "prefixstore.cache.saving",
    "prefixstore.cache.tiers.loading",
    "prefixstore.cache.cost_model",
)
OF_MODULES = ("runtime.pictures.vision_encoder", "runtime.files.parameters")
"""These compute and load models that are modules of transformers."""
OF_SERVING = tuple(
    name
    for name in SOURCES
    if package_of(name)
    in {
        "native",
        "prefixstore.store",
        "prefixstore.kv",
        "runtime",
        "prefixstore.cache",
        "daemon.engine",
        "daemon.chat",
        "daemon.api",
        "daemon.server",
    }
    and name not in OF_MODULES
)
OF_FEW_REQUESTS = {
    "llguidance",
    "prometheus_client",
    "gguf",
    "diskprefix.daemon.api.anthropic",
    "diskprefix.daemon.api.responses_items",
}
OF_THE_ROUTER = "daemon.app", "daemon.cli.serve_command", "daemon.router.router_server", "daemon.catalogue.catalogue"


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("modules", "slow"),
    [
        (OF_COMMANDS, {"torch", "transformers", "uvicorn"}),
        (OF_THE_ROUTER, {"torch", "transformers", "pydantic", "numpy", "zstandard"}),
        (OF_SERVING, {"torch", "transformers"}),
        (
            ("daemon.cli.serve_command", "daemon.server.process.process"),
            {"torch", "transformers", "pydantic", "starlette"},
        ),
        (("daemon.server.http_app", "daemon.engine.loop", "runtime.files.gguf.gguf"), OF_FEW_REQUESTS),
    ],
    ids=["commands and what simulates", "the router", "what serves", "what listens", "a start"],
)
def test_what_starts_first_imports_nothing_slow(modules: tuple[str, ...], slow: set[str]) -> None:
    names = [f"diskprefix.{module}" for module in modules]
    code = f"import {', '.join(names)}, sys; print(*sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = set(answer.stdout.split())
    assert set(names) <= imported
    assert not slow & imported


def test_no_program_that_is_started_is_looked_for_in_the_current_folder() -> None:
    # A command that users are shown is not started.
    started = {
        name: re.findall(r'(?<!shlex\.join\(\[)sys\.executable, "(-[^"]*)"', text) for name, text in SOURCES.items()
    }
    assert {name: first for name, first in started.items() if {*first} - {"-P", "-I"}} == {}
    assert started["desk.shared.launched_daemon"] == ["-P"]


ABSENT = {"llama_cpp": "llama-cpp-python"}
"""The distributions of modules that are not installed here."""


def test_every_package_that_is_imported_is_declared() -> None:
    """For all, for models without a plan, or in the optional dependencies of the room that imports it."""
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    distributions = packages_distributions()
    undeclared = set[tuple[str, str]]()
    for module, source in SOURCES.items():
        rooms = module.split(".")[:2]
        optional = project["optional-dependencies"]
        lines = [
            *project["dependencies"],
            *optional["transformers"],
            *(line for room in rooms for line in optional.get(room, ())),
        ]
        known = {canonicalize_name(Requirement(line).name) for line in lines}
        tops = (
            {package_of(name) for name in imported_names(source)}
            - sys.stdlib_module_names
            - {"diskprefix", "a computed name"}
        )
        undeclared |= {
            (module, top)
            for top in tops
            if known.isdisjoint(map(canonicalize_name, distributions.get(top, [ABSENT.get(top, top)])))
        }
    assert undeclared == set()


def foreign_names(source: str) -> set[str]:
    """Names with an underscore of other modules: what is imported, and attributes that the module does not define."""
    used, own = set[str](), set[str]()
    if not re.search(r"(?<!self)(?<!cls)\._[a-z]|import .*\b_[a-z]|^ +_\w+,$", source, re.MULTILINE):
        return set()  # Nothing needs to be parsed.
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                own.add(name)
            case ast.Attribute(attr=name):
                used.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                own.add(name)
    used = (used - own) | {name.rpartition(".")[2] for name in imported_names(source)}
    return {name for name in used - OF_PYTHON if name.startswith("_") and not name.startswith("__")}


def test_what_other_packages_keep_to_themselves_is_used_off_the_way_of_a_plan_alone() -> None:
    assert {name for name, source in SOURCES.items() if foreign_names(source)} == WITH_FOREIGN_NAMES
    assert foreign_names("import x\nx._hidden(self._own)") == {"_hidden"}
    assert foreign_names("from x import _hidden") == {"_hidden"}
