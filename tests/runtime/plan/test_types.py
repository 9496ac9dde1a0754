"""What a type is stands in its record alone, and a decoder's options are made of the record and of declared options."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diskprefix.runtime.plan import families
from diskprefix.runtime.plan.families.declared import is_option, option
from diskprefix.runtime.plan.families.types import known_types
from diskprefix.runtime.plan.families.types.known_types import TYPES
from diskprefix.runtime.plan.families.types.model_type import Experts, ModelType, Rotation
from diskprefix.runtime.plan.model_config import ModelConfig
from tests.exceptions import exceptions
from tests.runtime.plan.option_table import WHOLES
from tests.runtime.plan.test_undeclared_options import tiny_options

PACKAGE = Path(families.__file__).parents[3]
RECORDS = Path(known_types.__file__).parent
NAMES = frozenset({*TYPES, *WHOLES.split()})
_OF_LLAMA_CPP = ("devices", "llama_library", "load_llama")
MAY_NAME_TYPES = {
    **dict.fromkeys(
        [f"runtime/files/gguf/{name}_families.py" for name in ("dense", "known", "mixture", "recurrent", "windowed")],
        "the type that files of an architecture become",
    ),
    **dict.fromkeys(
        [
            "daemon/app.py",
            "runtime/runtime_options.py",
            "runtime/choose_runtime.py",
            *(f"runtime/llama/{name}.py" for name in _OF_LLAMA_CPP),
        ],
        "the name of an engine",
    ),
    **exceptions("MAY_NAME_TYPES"),
    "runtime/files/gguf/late_gemmas.py": "the type that files of an architecture become",
    "runtime/files/gguf/encoders.py": "the type that files with an encoder become",
    "runtime/files/gguf/file_tokenizer.py": "names of pre-tokenizers in files",
    "runtime/files/gguf/gguf_rope.py": "names of architectures of files",
    "runtime/fetch/proposals.py": "names that users have for models",
    "runtime/files/folder_tokenizer.py": "transformers' choice of a tokenizer, for types without a plan too",
}
"""The modules outside the records that have names of types, and what for."""


def types_named(source: str) -> set[str]:
    """The types that stand in the strings of a module, apart from docstrings: a name, or a list of names alone."""
    if NAMES.isdisjoint(re.findall(r"\w+", source)):
        return set()
    tree = ast.parse(source)
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    named = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            words = {*node.value.split()}
            named |= words if words <= NAMES else set()
    return named


def modules() -> Iterator[tuple[str, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        if RECORDS not in path.parents:
            yield str(path.relative_to(PACKAGE)), path.read_text(encoding="utf-8")


def test_no_module_asks_for_a_type_by_name() -> None:
    assert {name for name, source in modules() if types_named(source)} == {*MAY_NAME_TYPES}


def test_the_rule_finds_names_and_lists_of_them() -> None:
    assert types_named('if config.model_type == "qwen3": pass') == {"qwen3"}
    assert types_named('LATENT = """\n    deepseek_v2 youtu\n"""') == {"deepseek_v2", "youtu"}
    assert types_named('"""qwen3"""\nname = "the qwen3 of yesterday"') == set()


def test_families_read_options_through_the_declared_ones_alone() -> None:
    """What a type does not declare, transformers' modules do not read."""
    for path in sorted(Path(families.__file__).parent.glob("*.py")):
        asked = re.findall(r"getattr\((?:config|text|own), \"(\w+)\"", path.read_text(encoding="utf-8"))
        # About the whole of a configuration, and about pictures in any type.
        assert {*asked} <= {"context", "is_heterogeneous", "use_bidirectional_attention"}, path.name


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", TYPES)
def test_a_record_lists_the_options_that_it_derives_and_no_class_declares(kind: str) -> None:
    given: dict[str, Any]
    for given in ({}, tiny_options(kind)):
        values = {name for name in vars(ModelConfig.of({**given, "model_type": kind})) if not name.startswith("_")}
        assert {name for name in values if not is_option(kind, name)} <= {"model_type"}
        assert {*TYPES[kind].derives} <= values


def test_an_option_of_another_type_is_not_read() -> None:
    config = ModelConfig.of({"model_type": "llama"})
    config.__dict__["sliding_window"] = 4
    assert option(config, "sliding_window") is None
    assert option(config, "sliding_window", 7) == 7
    assert option(config, "num_hidden_layers") == 32


@pytest.mark.parametrize("record", [ModelType, Rotation, Experts])
def test_each_field_of_a_record_is_used_by_some_type(record: Any) -> None:
    of = {
        ModelType: TYPES.values(),
        Rotation: [each.rotary for each in TYPES.values()],
        Experts: [each.experts for each in TYPES.values() if each.experts is not None],
    }[record]
    usual = record()
    unused = [
        name for name in record.__struct_fields__ if all(getattr(one, name) == getattr(usual, name) for one in of)
    ]
    assert unused == []
