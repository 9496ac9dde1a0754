from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diskprefix.errors import InvalidScope
from diskprefix.scope import parse_scope
from diskprefix.values import DEFAULT_WINDOW, MAX_VALUE, Scope

FIELD = "prefix_cache.scope"
SCOPES = st.one_of(
    st.sampled_from([Scope("off"), Scope("full")]),
    st.builds(Scope, st.sampled_from(["auto", "tokens"]), st.integers(1, MAX_VALUE)),
)


@pytest.mark.parametrize(
    ("value", "scope", "text"),
    [
        ("off", Scope("off"), "off"),
        ("Full", Scope("full"), "full"),
        ("  full ", Scope("full"), "full"),
        ("auto", Scope("auto", DEFAULT_WINDOW), "auto:30"),
        ("auto:1000000", Scope("auto", 1_000_000), "auto:1000000"),
        ("auto:0030", Scope("auto", 30), "auto:30"),
        ("\tauto:8\n", Scope("auto", 8), "auto:8"),
        ("1", Scope("tokens", 1), "1"),
        ("1000000", Scope("tokens", 1_000_000), "1000000"),
        ("0" * 5000 + "7", Scope("tokens", 7), "7"),
        (1, Scope("tokens", 1), "1"),
        (1_000_000, Scope("tokens", 1_000_000), "1000000"),
    ],
)
def test_a_scope_inside_the_grammar_is_read_and_prints_its_canonical_text(
    value: object, scope: Scope, text: str
) -> None:
    assert parse_scope(value, param=FIELD) == scope
    assert str(scope) == text


def type_name(value: object) -> str:
    """A test id: some of the values have no printable text, or far too much of it."""
    return type(value).__name__


REFUSED: list[Any] = [
    "",
    "none",
    "ful",
    "off:1",
    "auto:",
    "auto:0",
    "auto:+1",
    "auto:1.5",
    "auto:1000001",
    "auto: 8",
    "auto8",
    "0",
    "+1",
    "1.0",
    "1_000",
    "0x10",
    "1000001",
    "auto:" + "9" * 5000,
    "٣٠",
    "auto:３０",
    "ﬀull",
    "off\x00",
    "auto\nfull",
    "auto\n" * 10_000,
    "\ud800",
    "\u202eotua",
    0,
    1_000_001,
    10**5000,
    True,
    1.0,
    float("nan"),
    None,
    [],
    {"scope": "auto"},
    ("auto", 30),
    b"auto",
]


@pytest.mark.parametrize("value", REFUSED, ids=type_name)
def test_anything_else_is_refused_in_a_printable_line_with_its_param_and_what_is_accepted(value: object) -> None:
    with pytest.raises(InvalidScope) as caught:
        parse_scope(value, param=FIELD)
    error = caught.value
    assert error.param == FIELD
    assert error.http_status == 400
    assert error.code == "invalid_scope"
    assert error.message.startswith(FIELD)
    for form in ("off", "full", "auto:N", "1 to 1000000"):
        assert form in error.message
    if not value and not isinstance(value, str):
        said = {"NoneType": "null", "list": "an array", "int": "0"}[type_name(value)]
        assert error.message.startswith(f"{FIELD}: {said} is not a cache scope")
    assert len(error.message) < 400
    assert error.message.isprintable()


def test_the_param_is_the_one_given() -> None:
    with pytest.raises(InvalidScope, match="--disk-prefix-cache") as caught:
        parse_scope("atuo", param="--disk-prefix-cache")
    assert caught.value.param == "--disk-prefix-cache"
    assert "'atuo'" in caught.value.message


@given(SCOPES, st.sampled_from([str.lower, str.upper, str.title]), st.sampled_from(["", " ", "\t\n", "\xa0"]))
def test_the_canonical_text_reads_back_in_any_case_and_with_blanks(scope: Scope, case: Any, blank: str) -> None:
    assert parse_scope(blank + case(str(scope)) + blank, param=FIELD) == scope


@given(st.one_of(st.text(), st.from_regex(r"\A\s*(auto:?|off|full)?-?\d*\s*\Z"), st.floats(), st.lists(st.text())))
def test_no_input_gives_anything_but_a_valid_scope_or_a_refusal(value: object) -> None:
    try:
        scope = parse_scope(value, param=FIELD)
    except InvalidScope:
        return
    assert parse_scope(str(scope), param=FIELD) == scope


@pytest.mark.parametrize(
    ("kind", "value"),
    [("off", 1), ("full", 30), ("auto", 0), ("auto", -1), ("auto", MAX_VALUE + 1), ("tokens", 0), ("best", 1), ("", 0)],
)
def test_a_scope_outside_the_grammar_cannot_be_built(kind: Any, value: int) -> None:
    with pytest.raises(InvalidScope):
        Scope(kind, value)


def test_the_window_field_overrides_the_window_of_auto_and_no_other_scope_has_one() -> None:
    assert parse_scope("auto", param=FIELD).with_window(8) == Scope("auto", 8)
    assert parse_scope("auto:2", param=FIELD).with_window(1_000_000) == Scope("auto", 1_000_000)
    for window in (0, -1, MAX_VALUE + 1):
        with pytest.raises(InvalidScope, match="1 to 1000000"):
            Scope("auto", 30).with_window(window)
    for scope in (Scope("off"), Scope("full"), Scope("tokens", 1000)):
        with pytest.raises(InvalidScope, match=f"only the scope auto has a window.*{scope}") as caught:
            scope.with_window(8)
        assert caught.value.param == "prefix_cache.window"
