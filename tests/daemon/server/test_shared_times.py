"""What one tenant has had computed makes nothing faster for another: the time tells nobody which schemas, tools or
pictures another one uses. And what one share has computed, under many salts or one, is not computed again for another.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import regex

from diskprefix.daemon.chat.messages import JsonObject
from diskprefix.daemon.chat.output.call_patterns import COMPILED
from diskprefix.daemon.chat.output.choose_format import OutputFormat
from diskprefix.daemon.chat.output.families import FAMILIES
from diskprefix.daemon.engine.constraints import constrained_reply
from diskprefix.daemon.engine.constraints.constrained_reply import ConstraintCompiler
from diskprefix.daemon.engine.constraints.trial import TokenizerText, Trials
from diskprefix.daemon.engine.request import Constraint
from diskprefix.runtime.pictures import picture_reader
from diskprefix.runtime.pictures.picture_reader import PictureReader
from diskprefix.values import Asker, Picture, Tenant
from tests.daemon.server.scripted import AppServer, ScriptedEngine, say_hello, scripted_app
from tests.daemon.server.test_auth import ALICE, BOB, bearer
from tests.source_files import PACKAGE, modules_in

Use = Callable[[Asker], object]
TOOLS: list[JsonObject] = [
    {"type": "function", "function": {"name": "read_ledger", "parameters": {"properties": {"a": {"type": "string"}}}}}
]


class Counted:
    """Stands for what takes long, and counts."""

    def __init__(self, result: Any = None) -> None:
        self.calls = 0
        self.result = result

    def __call__(self, *_: Any, **__: Any) -> Any:
        self.calls += 1
        return self if self.result is None else self.result

    def is_error(self) -> bool:
        return False

    def deep_copy(self) -> Counted:
        return self


def trials(_: pytest.MonkeyPatch) -> tuple[Use, Counted]:
    slow, made = Counted([b'{"compiled": {}}']), Trials(lambda: TokenizerText("", 0, None))
    made._ask = slow  # type: ignore[method-assign]
    constraint = Constraint(kind="json_schema", source='{"type": "object"}')
    return lambda asker: made.run(constraint, "format", {}, (), asker), slow


def grammars(patch: pytest.MonkeyPatch) -> tuple[Use, Counted]:
    slow = Counted()
    patch.setattr(constrained_reply, "matcher_of", slow)
    patch.setattr(ConstraintCompiler, "tokenizer", None)
    compiler = ConstraintCompiler(None, (), 1)
    return lambda asker: compiler.matcher(Constraint(kind="json_object", asker=asker)), slow


def patterns(patch: pytest.MonkeyPatch, use: Callable[[OutputFormat], object], has_channels: bool) -> Any:
    COMPILED.clear()
    slow, compile_ = Counted(), regex.compile

    def counted(pattern: str, *args: Any, **options: Any) -> Any:
        if "read_ledger" in pattern:
            slow()
        return compile_(pattern, *args, **options)

    patch.setattr(regex, "compile", counted)
    names_tools = {family.name for family in FAMILIES if family.channels and "NAMES" in family.channels.header}
    family = next(family for family in FAMILIES if (family.name in names_tools) == has_channels)
    return lambda asker: use(OutputFormat(family).of(asker)), slow


def parsers(patch: pytest.MonkeyPatch) -> Any:
    return patterns(patch, lambda format_: format_.parser(TOOLS, ""), has_channels=True)


def beginnings(patch: pytest.MonkeyPatch) -> Any:
    return patterns(patch, lambda format_: format_.beginning_of_calls(TOOLS), has_channels=False)


def forms(_: pytest.MonkeyPatch) -> tuple[Use, Counted]:
    reader = PictureReader(token_id=7)
    slow = Counted({"text_replacement_offsets": [[{"replacement": "x"}]], "input_ids": ListOfOne()})
    reader._process = slow  # type: ignore[method-assign]
    return lambda asker: reader._form((40, 30), "image", asker), slow


def decoded_pictures(patch: pytest.MonkeyPatch) -> tuple[Use, Counted]:
    reader, slow, name = PictureReader(), Counted(), b"n" * 16
    reader._process = Counted({})  # type: ignore[method-assign]
    patch.setattr(picture_reader, "_decode", slow)
    # Too few for three hundred salts.
    reader._problems.most = 100

    def use(asker: Asker) -> None:
        prepare = partial(reader._prepare, b"", (), "image", name, asker)
        assert reader.can_decode(Picture(name, "", 1, {}, "1x1", 1, "image", prepare), asker)

    return use, slow


class ListOfOne:
    def __eq__(self, _: object) -> Any:
        return self

    __hash__ = None  # type: ignore[assignment]

    def sum(self) -> int:
        return 1


@pytest.fixture
def keyed(chat_model: Path, keys_file: Path, engine: ScriptedEngine) -> Iterator[AppServer]:
    with scripted_app(chat_model, engine, api_keys=keys_file) as running:
        yield running


Memory = Callable[[pytest.MonkeyPatch], tuple[Use, Counted]]
MEMORIES = pytest.mark.parametrize("memory", [trials, grammars, parsers, beginnings, forms, decoded_pictures])
OF_ALICE, OF_BOB = (Asker(Tenant.of_key(name), f"key {name}") for name in ("alice", "bob"))


@MEMORIES
def test_values_are_computed_again_for_another_tenant(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    use, slow = memory(monkeypatch)
    use(OF_ALICE)
    first = slow.calls
    assert first > 0
    use(OF_ALICE)
    assert slow.calls == first, "it is kept"
    use(OF_BOB)
    use(OF_ALICE._replace(tenant=OF_ALICE.tenant.with_salt("a user of Alice's")))
    assert slow.calls == 3 * first, "for its tenant alone"


@MEMORIES
def test_many_salts_of_one_share_have_nothing_computed_again_for_another(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    use, slow = memory(monkeypatch)
    use(OF_ALICE)
    for number in range(300):
        use(OF_BOB._replace(tenant=OF_BOB.tenant.with_salt(str(number))))
    before = slow.calls
    use(OF_ALICE)
    assert slow.calls == before


OF_KEYS = {ALICE: Asker(Tenant.of_key(ALICE), "key alice"), BOB: Asker(Tenant.of_key(BOB), "key bob")}


def test_a_constraint_belongs_to_the_key_that_sent_it(keyed: AppServer, engine: ScriptedEngine) -> None:
    engine.script = say_hello
    body = {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}
    with keyed.client() as client:
        for key in (ALICE, BOB, ALICE):
            assert client.post("/v1/chat/completions", json=body, headers=bearer(key)).status_code == 200
    askers = [request.constraint.asker for request in engine.requests if request.constraint is not None]
    assert askers == [OF_KEYS[key] for key in (ALICE, BOB, ALICE)]


OF_THE_MODEL = {
    "daemon/chat/client_text.py": {"never"},
    "daemon/chat/output/call_patterns.py": {"patterns_of"},
    "daemon/chat/output/choose_format.py": {"_holds_call"},
    "daemon/engine/constraints/constraint_grammar.py": {"limits"},
    "runtime/choose_runtime.py": {"read"},
    "daemon/catalogue/adviser.py": {"_has_vnni"},
    "runtime/library/library_model.py": {"_view_class"},
    "prefixstore/simulate/simulator.py": {"_bytes_of"},
    "desk/shared/web_page.py": {"_document"},
}
"""Functions whose arguments no client sends."""


def kept_functions(path: Path) -> set[str]:
    """Returns the names of the functions in a file whose results `functools` keeps."""
    cached = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and any(_keeps(decorator) for decorator in node.decorator_list):
            cached.add(node.name)
        if isinstance(node, ast.Assign):
            calls = [call for call in ast.walk(node.value) if isinstance(call, ast.Call)]
            names = {name.attr if isinstance(name, ast.Attribute) else ast.unparse(name) for name in node.targets}
            cached |= names if any(map(_keeps, calls)) else set()
    return cached


def _keeps(node: ast.expr) -> bool:
    function = node.func if isinstance(node, ast.Call) else node
    return _keeps(function) if isinstance(function, ast.Call) else ast.unparse(function) in ("cache", "lru_cache")


_BY_TENANT = re.compile(r"self\.(\w+): \w*(?:[dD]ict|Counter|set)\w*\[(?:tuple\[)?(?:Tenant|Asker|Owner|Epoch)\b")
NOT_DIVIDED = {
    "prefixstore/cache/encoded_pictures.py": ["_copied"],
    "prefixstore/kv/kept_blocks.py": ["blocks", "_children", "_logits"],
    "prefixstore/store/statistics/savings.py": ["_waiting"],
}
"""What is held by tenant and in no fair cache: outputs of the encoder that wait for the disk, within the write buffer;
KV memory, by the last use, as on the disk; counts of requests while the store fails."""


def test_shares_divide_the_room_of_all_that_is_held_by_tenant() -> None:
    found = {path.relative_to(PACKAGE): _BY_TENANT.findall(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")}
    assert {str(path): names for path, names in found.items() if names} == NOT_DIVIDED


def test_a_fair_cache_alone_keeps_results_for_what_clients_send() -> None:
    cached = {
        str(path.relative_to(PACKAGE)): names
        for path in modules_in(
            "daemon/api",
            "daemon/chat",
            "daemon/engine",
            "daemon/server",
            "daemon/catalogue",
            "daemon/compression",
            "daemon/embedding",
            "daemon/infill",
            "daemon/ollama",
            "daemon/router",
            "prefixstore/packs",
            "prefixstore/recording",
            "prefixstore/remote",
            "prefixstore/simulate",
            "runtime/library",
            "runtime/pictures",
            "desk",
            "bridges",
            "runtime/choose_runtime.py",
        )
        if (names := kept_functions(path))
    }
    assert cached == OF_THE_MODEL
