"""Rewrites JSON schemas so that llguidance guarantees them: it reads numbers as doubles, and proves little about
`oneOf`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import combinations, starmap
from typing import Any, NamedTuple, TypeAlias

from diskprefix.daemon.engine.constraints.schema_numbers import NotKept, RuledNumbers, is_long, schema_text, settled

Path: TypeAlias = tuple[str | int, ...]
JsonSchema: TypeAlias = dict[str, Any]

MAX_CHARS = 1 << 19
"""The maximum number of characters of a schema or grammar."""
_MAX_COMPARED, _COMPARED_PER_PART, _MAX_REFERENCES = 50_000, 64, 8
"""The effort of proving that branches of `oneOf` differ: the maximum number of values and pairs of values, per schema
and for each part of the schema, and the maximum length of a chain of references."""
_DEFINITIONS = ("$defs", "definitions")
_SAY_NOTHING = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator"}
"""Keywords that allow any value. So do keywords that begin with "$" or "x-" and are not `$ref`."""


class Loosened(NamedTuple):
    """The JSON text of a schema without the parts that a grammar cannot guarantee, and the paths and reasons of the
    parts left out."""

    schema: str
    left_out: list[str]


def parts(schema: JsonSchema) -> Iterator[tuple[Path, Any]]:
    """Yields the schemas inside a schema, each with its path."""
    for key, value in schema.items():
        if key in ("items", "additionalItems", "additionalProperties") and isinstance(value, dict):
            yield (key,), value
        elif key in ("properties", "patternProperties", *_DEFINITIONS) and isinstance(value, dict):
            yield from (((key, name), part) for name, part in value.items())
        elif key in ("allOf", "anyOf", "oneOf", "prefixItems", "items") and isinstance(value, list):
            yield from (((key, index), part) for index, part in enumerate(value))


def replace_part(schema: JsonSchema, path: Path, part: Any) -> JsonSchema:
    """Returns a schema with another part at `path`. The other parts are shared with the given schema."""
    if not path:
        return part if isinstance(part, dict) else {}
    copy = dict(schema)
    place: Any = copy
    for step in path[:-1]:
        inner = place[step]
        place[step] = inner.copy()
        place = place[step]
    place[path[-1]] = part
    return copy


def definitions_of(schema: JsonSchema) -> JsonSchema:
    """Returns the keywords of a schema that its references can point to."""
    return {key: schema[key] for key in _DEFINITIONS if key in schema}


def with_any_of(schema: JsonSchema, *, only_proven: bool) -> tuple[JsonSchema, list[Path]]:
    """Returns a schema with `anyOf` in place of each `oneOf`, and the paths where `anyOf` may allow more, because it is
    not proven that a value fits at most one branch. With `only_proven`, these stay `oneOf`. Raises `ValueError` for a
    schema that is not an object."""
    if not isinstance(schema, dict):
        raise ValueError("a schema must be an object")
    proof, wider = _Proof(schema), list[Path]()

    def change(part: Any, path: Path) -> Any:
        if not isinstance(part, dict):
            return part
        # Bound: the nesting of the schema.
        changed = with_parts(part, lambda inner, step: change(inner, path + step))
        if not isinstance(branches := part.get("oneOf"), list) or "anyOf" in part:
            return changed
        if not proof.all_differ(branches):
            wider.append((*path, "oneOf"))
            if only_proven:
                return changed
        return {"anyOf" if key == "oneOf" else key: value for key, value in changed.items()}

    return change(schema, ()), wider


def with_parts(schema: JsonSchema, change: Callable[[Any, Path], Any]) -> JsonSchema:
    """Returns a copy of a schema in which each part that `parts` yields is replaced by the result of `change(part,
    path)`."""
    copy = {key: value.copy() if isinstance(value, dict | list) else value for key, value in schema.items()}
    for path, part in parts(schema):
        place: Any = copy
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = change(part, path)
    return copy


class _Proof:
    """Proves that no value fits two branches of a schema. The effort grows at most linearly with the schema."""

    def __init__(self, schema: JsonSchema) -> None:
        self._references = _references(schema)
        self._left = min(_MAX_COMPARED, _COMPARED_PER_PART * len(_all_parts(schema)))
        self._known: dict[tuple[int, int], bool] = {}
        """True for two schemas, by their identities, that are proven to differ."""

    def all_differ(self, branches: list[Any]) -> bool:
        if self._have_own_values([_resolved(branch, self._references) for branch in branches]):
            return True
        return len(branches) ** 2 <= self._left and all(starmap(self._differ, combinations(branches, 2)))

    def _have_own_values(self, branches: list[Any]) -> bool:
        """Returns whether each branch has its own values, or is an object with its own values under one key. This is
        the usual form, and the proof compares no pairs."""
        if not all(isinstance(branch, dict) for branch in branches):
            return False
        if _are_distinct(map(_values, branches)):
            return True
        if not all(_types(branch) == {"object"} for branch in branches):
            return False
        keys = set[str].intersection(*(set(_required(branch)) for branch in branches)) if branches else ()
        return any(_are_distinct(self._values_under(key, branches)) for key in keys)

    def _values_under(self, key: str, branches: list[Any]) -> Iterator[list[Any]]:
        for branch in branches:
            schema = _resolved(_property(branch, key), self._references)
            yield _values(schema) if isinstance(schema, dict) else []

    def _differ(self, branch: Any, other: Any) -> bool:
        branch, other = (_resolved(schema, self._references) for schema in (branch, other))
        pair = id(branch), id(other)
        if pair not in self._known:
            # Not proven during the comparison, because a schema may contain itself.
            self._known[pair] = False
            self._known[pair] = isinstance(branch, dict) and isinstance(other, dict) and self._are_proven(branch, other)
        return self._known[pair]

    def _are_proven(self, branch: JsonSchema, other: JsonSchema) -> bool:
        values, other_values = _values(branch), _values(other)
        self._left -= (
            1
            + len(values) * len(other_values)
            + sum(
                len(listed)
                for schema in (branch, other)
                for key in ("type", "enum", "required")
                if isinstance(listed := schema.get(key), list)
            )
        )
        if self._left < 0:
            return False
        types, other_types = _types(branch), _types(other)
        if types and other_types and not types & other_types:
            return True
        if values and other_values:
            return not any(value == another for value in values for another in other_values)
        if types != {"object"} or other_types != {"object"}:
            return False
        required, other_required = _required(branch), _required(other)
        # In the order of the schema: the order of a set would differ between processes, and so would the set of proven
        # schemas.
        keys = dict.fromkeys(required + other_required)
        return (
            any(self._differ(_property(branch, key), _property(other, key)) for key in keys)
            or any(_forbids(other, key) for key in required)
            or any(_forbids(branch, key) for key in other_required)
        )


def _are_distinct(lists: Iterable[list[Any]]) -> bool:
    """Returns whether each list has values, and no value is in two lists. Compares plain values only."""
    seen = set[Any]()
    for values in lists:
        if not values or any(isinstance(value, list | dict) for value in values) or not seen.isdisjoint(values):
            return False
        seen.update(values)
    return True


def _all_parts(schema: Any) -> list[Any]:
    """Returns a schema and all schemas inside it."""
    schemas = [schema]
    for part in schemas:
        if isinstance(part, dict):
            schemas += (inner for _, inner in parts(part))
    return schemas


def _references(schema: JsonSchema) -> JsonSchema:
    """Returns the definitions of a schema by the references that point to them."""
    return {
        f"#/{key}/{name.replace('~', '~0').replace('/', '~1')}": part
        for key in _DEFINITIONS
        if isinstance(definitions := schema.get(key), dict)
        for name, part in definitions.items()
    }


def _resolved(schema: Any, references: JsonSchema) -> Any:
    """Returns the schema that a reference to a definition points to."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            return schema
        schema = references.get(schema["$ref"])
    return None


_TYPES = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}


def _types(schema: JsonSchema) -> set[str]:
    """Returns the types that a value may have, with "number" for integers; the empty set if the schema names no
    types."""
    declared = schema.get("type")
    if declared is None:
        return {_TYPES.get(type(value), "null") for value in _values(schema)}
    names = declared if isinstance(declared, list) else [declared]
    return {"number" if name == "integer" else str(name) for name in names}


def _values(schema: JsonSchema) -> list[Any]:
    """Returns the values of `const` or `enum`; [] if neither is there."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else []


def _required(schema: JsonSchema) -> list[str]:
    required = schema.get("required")
    return [key for key in required if isinstance(key, str)] if isinstance(required, list) else []


def _property(schema: JsonSchema, key: str) -> Any:
    properties = schema.get("properties")
    return properties.get(key) if isinstance(properties, dict) else None


def _forbids(schema: JsonSchema, key: str) -> bool:
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    return is_closed and _property(schema, key) is None


def json_rules(name: str, schema: JsonSchema) -> list[str]:
    """Returns the lines of a Lark grammar whose rule `name` is the JSON of a schema. `x-guidance` in it has the options
    of llguidance. Raises `NotKept`."""
    kept = _settled(with_any_of(schema, only_proven=True)[0])
    holders = _holders_of_big(kept)
    if id(kept) not in holders:
        return [f"{name}: %json {schema_text(kept)}"]
    rules = _ExactRules(name, kept, holders)
    return [f"{name}: {rules.value(kept)}", *rules.lines]


def _settled(schema: Any) -> Any:
    """Returns a schema with settled numbers, also in the schemas inside it."""
    if not isinstance(schema, dict):
        return schema
    # Bound: the nesting of the schema.
    return settled(with_parts(schema, lambda inner, _: _settled(inner)))


def _has_big(value: Any) -> bool:
    """Returns whether a value is or contains a number that llguidance would change."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    # Bound: the nesting of the value.
    return is_long(value) or any(map(_has_big, inner))


def _holders_of_big(schema: JsonSchema) -> set[int]:
    """Returns the identities of the parts that allow such a number (see `is_long`) as a value, in themselves or in the
    schemas that they refer to."""
    references, outer = _references(schema), defaultdict[int, list[int]](list)
    unseen: list[Any] = [schema]
    unvisited: list[int] = []
    for part in unseen:
        if not isinstance(part, dict):
            continue
        if isinstance(part, RuledNumbers) or any(map(_has_big, _values(part))):
            unvisited.append(id(part))
        if isinstance(reference := part.get("$ref"), str) and reference in references:
            outer[id(references[reference])].append(id(part))
        for path, inner in parts(part):
            unseen.append(inner)
            if path[0] not in _DEFINITIONS:
                outer[id(inner)].append(id(part))
    holders = set[int]()
    # Bound: each part is visited once with the parts around it.
    while unvisited:
        holder = unvisited.pop()
        if holder not in holders:
            holders.add(holder)
            unvisited += outer[holder]
    return holders


class _ExactRules:
    """The rules, as texts, of a schema that contains numbers that llguidance would change. Parts without such numbers
    are left to llguidance.

    Objects have their properties in the order of the schema and no others, which is less than the schema may allow.
    """

    def __init__(self, name: str, schema: JsonSchema, holders: Collection[int]) -> None:
        self.lines: list[str] = []
        self._name, self._holders = name, holders
        self._num_chars = 0
        self._definitions, self._references = definitions_of(schema), _references(schema)
        self._options: JsonSchema = schema.get("x-guidance") or {}
        # Encoded once, because the text is repeated for each part.
        self._shared = self._definitions | {"x-guidance": self._options}
        self._shared_text = schema_text(self._shared)
        self._named: dict[str, str] = {}
        """The names of the rules of references."""
        blank = self._options.get("whitespace_pattern", "[ \\t\\n\\r]{0,40}")
        self._blank = f"/({blank})?/" if self._options.get("whitespace_flexible", True) else ""
        self._comma, self._colon = (
            f"{self._blank} {json.dumps(self._options.get(key, sign))} {self._blank}"
            for key, sign in (("item_separator", ","), ("key_separator", ":"))
        )

    def value(self, schema: Any, around: JsonSchema = {}) -> str:  # noqa: B006 (never changed)
        """Returns the expression of a value of a schema. A schema without a type has the type of `around`."""
        # Bound: the nesting of the schema, and one rule for each reference.
        part: JsonSchema = schema if isinstance(schema, dict) else {}
        holds = id(schema) in self._holders
        if isinstance(schema, RuledNumbers):
            return self._numbers(schema, around)
        if "type" in around and isinstance(schema, dict):
            part = {"type": around["type"]} | part
        if not holds:
            return self._rule(f"%json {self._whole(part)}")
        keys = {key for key in part if key not in _SAY_NOTHING and (key == "$ref" or key[:1] not in "$x")}
        keys -= {"definitions"}
        if keys == {"$ref"}:
            return self._reference(part["$ref"])
        if keys <= {"const", "enum", "type"}:
            return self._constants(part)
        if keys in ({"anyOf"}, {"anyOf", "type"}):
            return f"({' | '.join(self.value(branch, part) for branch in part['anyOf'])})"
        declared = part.get("type")
        if keys <= {"type", "properties", "required", "additionalProperties"} and declared in (None, "object"):
            return self._object(part)
        if keys <= {"type", "items", "prefixItems", "minItems", "maxItems"} and declared in (None, "array"):
            return self._array(part)
        raise NotKept("the digits of a number cannot be guaranteed beside " + ", ".join(sorted(keys)))

    def _numbers(self, schema: RuledNumbers, around: JsonSchema) -> str:
        if schema.types is None and "type" in around:
            raise NotKept("such bounds of a number need a type beside them")
        if any(key in schema for key in ("$ref", "allOf", "anyOf", "oneOf", "not", "if")):
            raise NotKept("such bounds of a number cannot be guaranteed beside other schemas")
        number = self._terminal(schema.rule)
        if schema.types is not None and {*schema.types} <= {"integer", "number"}:
            return number
        return f"({number} | {self._rule(f'%json {self._whole(schema)}')})"

    def _whole(self, part: JsonSchema) -> str:
        """Returns JSON text of a part with the definitions and options of the whole schema."""
        own = {key: value for key, value in part.items() if key not in self._shared}
        return f"{schema_text(own)[:-1]}, {self._shared_text[1:]}" if own else self._shared_text

    def _terminal(self, expression: str) -> str:
        self._rule(expression)
        name = f"{self._name}_{len(self.lines) - 1}".upper()
        self.lines[-1] = f"{name}: {expression}"
        return name

    def _rule(self, expression: str) -> str:
        # The definitions are repeated for each part.
        self._num_chars += len(expression)
        if self._num_chars > MAX_CHARS:
            raise NotKept(f"the digits of a number make a grammar of more than {MAX_CHARS} characters")
        name = f"{self._name}_{len(self.lines)}"
        self.lines.append(f"{name}: {expression}")
        return name

    def _reference(self, reference: str) -> str:
        if reference not in self._named:
            # Named first: the schema may refer to itself.
            self._named[reference] = f"{self._name}_ref_{len(self._named)}"
            self.lines.append(f"{self._named[reference]}: {self.value(self._references.get(reference))}")
        return self._named[reference]

    def _constants(self, schema: JsonSchema) -> str:
        types = _types(schema)
        texts = [
            json.dumps(json.dumps(value, ensure_ascii=False), ensure_ascii=False)
            for value in _values(schema)
            if _TYPES.get(type(value), "null") in types
        ]
        if not texts:
            raise NotKept("no value of const or enum has the type")
        return f"({' | '.join(texts)})"

    def _object(self, schema: JsonSchema) -> str:
        listed, required = schema.get("properties"), dict.fromkeys(_required(schema))
        properties = listed if isinstance(listed, dict) else {}
        members = {key: properties.get(key, {}) for key in [*properties, *required]}
        first, rest = '""', '""'
        # From the last to the first: a member needs a comma only if another member comes before it.
        for key, part in reversed(members.items()):
            name = json.dumps(json.dumps(key, ensure_ascii=False), ensure_ascii=False)
            member = self._rule(f"{name} {self._colon} {self.value(part)}")
            is_optional = key not in required
            first = self._rule(f"{member} {rest}" + (f" | {first}" if is_optional else ""))
            rest = self._rule(f"({self._comma} {member}){'?' if is_optional else ''} {rest}")
        return f'"{{" {self._blank} {first} {self._blank} "}}"'

    def _array(self, schema: JsonSchema) -> str:
        items, prefix = schema.get("items", {}), schema.get("prefixItems", [])
        min_items, max_items = schema.get("minItems", 0), schema.get("maxItems")
        numbers_fit = isinstance(min_items, int) and isinstance(max_items, int | None)
        if not (numbers_fit and isinstance(prefix, list) and isinstance(items, dict | bool)):
            raise NotKept("items, prefixItems, minItems or maxItems has a value of another type")
        elements = list(map(self.value, prefix))
        if max_items is not None and max_items < max(1, len(elements)):
            raise NotKept("the digits of a number cannot be guaranteed with so few maxItems")
        tail = ""
        if items is not False:
            # It gets its own rule, because it is used twice.
            item = self._rule(self.value(items))
            elements = elements or [item]
            max_more = "" if max_items is None else max_items - len(elements)
            tail = f"({self._comma} {item}){{{max(0, min_items - len(elements))},{max_more}}}"
        # Each optional element is in brackets together with all elements after it.
        begins = [
            f"{'' if index < min_items else '('}{self._comma if index else ''} {element} "
            for index, element in enumerate(elements)
        ]
        ends = ")?" * max(0, len(elements) - max(0, min_items))
        return f'"[" {self._blank} {"".join(begins)}{tail}{ends} {self._blank} "]"'


def weaker(part: JsonSchema, compiles: Callable[[JsonSchema], bool]) -> JsonSchema:
    """Returns a schema that allows all values of `part`, and more: without the keywords that do not compile alone, or
    with the type only. A `oneOf` becomes `anyOf`."""
    changed = part if "anyOf" in part else {"anyOf" if key == "oneOf" else key: value for key, value in part.items()}
    changed = {key: value for key, value in changed.items() if compiles({key: value})}
    if changed != part and compiles(changed):
        return changed
    only_type = {key: value for key, value in part.items() if key == "type"}
    return only_type if only_type != part and compiles(only_type) else {}
