"""Constrained replies, sampled from random logits: the hardest text, because nothing in them helps the grammar. And
constraints that cannot be compiled: what the client is told, and that hostile ones cost little."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, cast

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLParserLimits
from msgspec.structs import replace
from regex import compile as compile_pattern

from diskprefix.daemon.engine.constraints import constraint_grammar, kept_schema
from diskprefix.daemon.engine.constraints.constrained_reply import ConstrainedCalls, ConstraintCompiler
from diskprefix.daemon.engine.constraints.constraint_grammar import Forbidden, forbidden_by, repeated
from diskprefix.daemon.engine.constraints.kept_schema import JsonSchema, with_any_of
from diskprefix.daemon.engine.request import Constraint, FreeText, SamplingParams
from diskprefix.daemon.engine.sampler import Sampler
from diskprefix.errors import InvalidRequest
from tests.daemon.chat.families.families import named, tokenizer_of
from tests.random_schemas import random_schema
from tests.runtime.plan import tiny

EOS, VOCAB = 2, 300
"""Those of `compiler`: more logits than the tokenizer has tokens, as many models have."""
PROMPT = np.array([5, 6], np.int32)


@dataclass
class Reply:
    text: str
    tokens: list[int]
    is_ended: bool
    """By the end token, or because nothing else could follow."""


def write(
    compiler: ConstraintCompiler,
    constraint: Constraint,
    *,
    seed: int = 0,
    max_tokens: int = 3000,
    likely: str = "",
    **params: Any,
) -> Reply:
    """A reply that is sampled from random logits. `likely`: a text that they would write if nothing forbade it."""
    tokenizer = tiny.tokenizer()
    wanted = [*tokenizer(likely, add_special_tokens=False)["input_ids"], EOS] if likely else []
    generator = torch.Generator().manual_seed(seed)
    sampling = SamplingParams(**({"seed": seed} | params))
    sampler = Sampler(sampling, PROMPT, constraint=compiler.begin_reply(constraint))
    tokens: list[int] = []
    while len(tokens) < max_tokens and not sampler.is_complete and EOS not in tokens:
        logits = torch.randn(VOCAB, generator=generator).numpy()
        if len(tokens) < len(wanted):
            logits[wanted[len(tokens)]] += 50
        tokens.append(sampler.sample(logits))
        sampler.record_text(tokenizer.decode(tokens[-1:]))
    return Reply(tokenizer.decode(tokens, skip_special_tokens=True), tokens, sampler.is_complete or EOS in tokens)


def mask_of(reply: Any) -> Forbidden:
    forbidden: Forbidden = reply.forbidden()
    return forbidden


def schema(value: Any) -> Constraint:
    return Constraint(kind="json_schema", source=json.dumps(value))


def regex(pattern: str, **kwargs: Any) -> Constraint:
    return Constraint(kind="lark", source=f"start: /{pattern}/", **kwargs)


@pytest.mark.cases(16)
@pytest.mark.parametrize("seed", range(60))
def test_what_is_written_to_a_random_schema_validates(compiler: ConstraintCompiler, seed: int) -> None:
    wanted = random_schema(seed)
    reply = write(compiler, schema(wanted), seed=seed)
    assert reply.is_ended
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.validate(json.loads(reply.text), wanted, format_checker=checker)


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        (regex("(ab|c){2,5}-[0-9]+"), "(ab|c){2,5}-[0-9]+"),
        (Constraint(kind="choice", source='["yes", "no", "né \\"\\n"]'), 'yes|no|né "\n'),
        (Constraint(kind="lark", source='start: "a" B+\nB: /[0-9]{2}/'), r"a(\d\d)+"),
        (Constraint(kind="lark", source='start: <|im_start|> "x"'), "x"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.kind,
)
def test_each_kind_of_constraint_is_kept(compiler: ConstraintCompiler, constraint: Constraint, pattern: str) -> None:
    for seed in range(5):
        reply = write(compiler, constraint, seed=seed)
        assert reply.is_ended
        assert re.fullmatch(pattern, reply.text), reply.text


SOME_ONES = {"type": "array", "items": {"const": 1}, "minItems": 1}
OBJECT_TEXT = '{"a": [1, {"b": null}], "c": "é"}'


@pytest.mark.parametrize(
    ("constraint", "likely", "written"),
    [
        (Constraint(kind="json_object", source=""), OBJECT_TEXT, re.escape(OBJECT_TEXT)),
        (Constraint(kind="json_object", source=""), "[1]", r"\{.*"),
        (regex("abc(def)*"), "ab", "abc(def)*"),
        (regex("abc(def)*"), "abc", "abc"),
        (regex("abc"), "", "abc"),
        (schema(SOME_ONES), "[" + " " * 500, r"\[\s{,99}1.*"),
        (Constraint(kind="lark", source=f"start: %json {json.dumps(SOME_ONES)}"), "[" + " " * 500, r"\[\s{,99}1.*"),
    ],
)
def test_what_is_likely_is_written_as_far_as_the_constraint_lets_it(
    compiler: ConstraintCompiler, constraint: Constraint, likely: str, written: str
) -> None:
    """A reply ends only where the constraint lets it, and white space between values is bounded."""
    assert re.fullmatch(written, write(compiler, constraint, likely=likely, max_tokens=200).text, re.DOTALL)


def test_only_a_reply_that_could_go_on_has_an_end_token(compiler: ConstraintCompiler) -> None:
    assert write(compiler, regex("abc(def)*"), likely="abc").tokens[-1] == EOS
    assert EOS not in write(compiler, regex("abc")).tokens


def test_masks_are_computed_on_threads_of_their_own_as_soon_as_a_token_is_known(
    compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: SimpleQueue[str] = SimpleQueue()

    def noted(*args: Any) -> Forbidden:
        computed.put(threading.current_thread().name)
        return forbidden_by(*args)

    monkeypatch.setattr("diskprefix.daemon.engine.constraints.constrained_reply.forbidden_by", noted)
    reply = compiler.begin_reply(regex("[ab]{3}"))
    a = tiny.tokenizer().convert_tokens_to_ids("a")
    for _ in range(2):
        # Nobody has asked for this mask.
        assert computed.get(timeout=60).startswith("masks")
        assert not mask_of(reply)[a]
        assert reply.accept_token(a)


# Free text before.


@pytest.mark.parametrize("end", ["</think>", "X", "é😀", "<|im_start|>"])
def test_the_constraint_begins_behind_the_end_of_free_text(compiler: ConstraintCompiler, end: str) -> None:
    free = "I can say anything: {}[] <|"
    reply = write(compiler, regex("[0-9]{4}", before=FreeText(end=end)), likely=free + end + "free no more")
    shown = "" if end == "<|im_start|>" else end
    assert re.fullmatch(re.escape(free + shown) + "[0-9]{4}", reply.text)


def test_a_reply_does_not_end_in_its_free_text(compiler: ConstraintCompiler) -> None:
    reply = write(compiler, regex("ab", before=FreeText(end="Z")), likely="free", temperature=0, max_tokens=4000)
    assert EOS not in reply.tokens[:-1]
    assert re.fullmatch("free.*Zab", reply.text, re.DOTALL)
    assert reply.text.count("Z") == 1


@pytest.mark.parametrize(("pattern", "pieces"), [("l[0-9]", ["he", "ll"]), ("[0-9]{2}", ["he", "l"])])
def test_a_token_may_end_free_text_only_if_the_constraint_accepts_the_rest_of_it(
    compiler: ConstraintCompiler, pattern: str, pieces: list[str]
) -> None:
    """`he` and `ll` are tokens. The free text ends in the middle of `ll`, and `l` is the next best."""
    ids = tiny.tokenizer().convert_tokens_to_ids(["he", "ll", "l"])
    allowed = compiler.begin_reply(regex(pattern, before=FreeText(end="hel")))
    sampler = Sampler(SamplingParams(temperature=0), PROMPT, constraint=allowed)
    logits = np.zeros((2, VOCAB), np.float32)
    logits[0, ids[0]] = 9
    logits[1, ids[1:]] = [9.0, 8.0]
    assert [sampler.sample(row) for row in logits] == tiny.tokenizer().convert_tokens_to_ids(pieces)
    rest = [sampler.sample(np.zeros(VOCAB, np.float32)) for _ in range(3 - len(pieces[1]))]
    assert tiny.tokenizer().decode(rest).isdigit()
    assert sampler.is_complete


@pytest.mark.parametrize(
    "likely",
    [
        "<think>free{}</think><1234free",
        "<think>free{}</think>1234free",
        "1234free",
        "<1234",
        "<x1234",
        "<|im_start|>free{}</think>1234free",
    ],
)
def test_free_text_that_may_come_comes_only_if_the_reply_begins_with_its_tag(
    compiler: ConstraintCompiler, likely: str
) -> None:
    tag = "<|im_start|>" if likely.startswith("<|im_start|>") else "<think>"
    before = FreeText(begin=tag, end="</think>")
    for seed in range(5):
        reply = write(compiler, regex("<?[0-9]{4}", before=before), seed=seed, likely=likely)
        wanted = likely.removesuffix("free").replace("<|im_start|>", "")
        assert re.fullmatch(re.escape(wanted) if "x" not in likely else r"<(think>.*</think><?)?[0-9]{4}", reply.text)


@pytest.mark.parametrize(
    ("pattern", "likely", "text"),
    [("t?[0-9]{4}", "<t1234", "<think>"), ("<(th)?", "<", "<"), ("<(th)?", "<th", "<th")],
)
def test_a_tag_that_has_begun_is_only_left_where_the_constraint_allows_it(
    compiler: ConstraintCompiler, pattern: str, likely: str, text: str
) -> None:
    constraint = regex(pattern, before=FreeText(begin="<think>", end="</think>"))
    assert write(compiler, constraint, likely=likely, max_tokens=7).text == text


# What goes wrong.


def refuse() -> str:
    raise InvalidRequest("too much")


@pytest.mark.parametrize(
    ("likely", "written", "changes"),
    [
        ("I call aba! Now call xx", "I call aba! Now call [ab]{3}!.*", {}),
        ("call", "call [ab]{3}!.*", {"source": "", "make_source": lambda: "start: /call [ab]{3}!/"}),
        ("call x</t>call x", "call x</t>call [ab]{3}!.*", {"before": FreeText(end="</t>")}),
        ("Hm<t>call x</t>call x", "Hm<t>call x</t>call [ab]{3}!.*", {"before": FreeText(end="</t>", begin="<t>")}),
        ("call x", "call x", {"source": "", "make_source": refuse}),
        ("I recall.", "I recall.", {"begins": re.compile("\\bcall")}),
    ],
)
def test_a_reply_is_free_but_for_its_calls(
    compiler: ConstraintCompiler, likely: str, written: str, changes: dict[str, Any]
) -> None:
    constraint = Constraint(kind="lark", source="start: /call [ab]{3}!/", begins=compile_pattern("call"))
    reply = write(compiler, replace(constraint, **changes), likely=likely)
    assert reply.is_ended
    assert re.fullmatch(written, reply.text, re.DOTALL)


def test_a_grammar_of_calls_is_made_beside_the_prompt_and_not_before(compiler: ConstraintCompiler) -> None:
    made: SimpleQueue[str] = SimpleQueue()

    def make_source() -> str:
        made.put(threading.current_thread().name)
        return "start: /call [ab]/"

    reply = compiler.begin_reply(Constraint(kind="lark", begins=compile_pattern("call"), make_source=make_source))
    assert isinstance(reply, ConstrainedCalls)
    assert reply.is_ready
    assert made.empty()
    for _ in range(2):
        reply.prepare()
    assert made.get(timeout=60).startswith("masks")
    reply.record_text("call")
    assert mask_of(reply) is not None
    assert made.empty()


def test_the_text_of_a_tokenizer_without_merges_has_its_tokens() -> None:
    from llguidance import LLTokenizer

    tokenizer = tokenizer_of(named("phi-3.5"))
    text, num_tokens, eos = ConstraintCompiler(tokenizer, {2}, len(tokenizer))._tokenizer_text()
    whole = tokenizer.backend_tokenizer.to_str()
    assert len(text) < len(whole)
    short, full = (LLTokenizer(one, n_vocab=num_tokens, eos_token=eos) for one in (text, whole))
    assert all(short.decode_bytes([token]) == full.decode_bytes([token]) for token in range(0, num_tokens, 7))
    for said in ("Zürich 日本語", " a\n\n</s>"):
        assert short.decode_bytes(short.tokenize_bytes(said.encode())) == said.encode()


def test_what_was_compiled_is_not_compiled_again(compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    constraint = regex("known [0-9]{1,9}")
    compiler.check_constraint(constraint, param="tools")
    compiler.matcher(constraint)
    monkeypatch.setattr(compiler._trials, "_ask", None)
    monkeypatch.setattr("diskprefix.daemon.engine.constraints.constrained_reply.matcher_of", None)
    compiler.check_constraint(constraint, param="tools")
    assert compiler.matcher(constraint).consume_tokens(
        tiny.tokenizer()("known 7", add_special_tokens=False)["input_ids"]
    )


def test_a_bias_that_forbids_all_that_is_allowed_is_the_requests_fault(compiler: ConstraintCompiler) -> None:
    a, b = (tiny.tokenizer().convert_tokens_to_ids(letter) for letter in "ab")
    with pytest.raises(InvalidRequest, match="sampling parameters leave no finite score"):
        write(compiler, regex("[ab]"), logit_bias={a: -torch.inf, b: -torch.inf})
    assert write(compiler, regex("[ab]"), logit_bias={a: -torch.inf}).text == "b"


def test_penalties_and_cuts_keep_what_is_allowed(compiler: ConstraintCompiler) -> None:
    cuts: dict[str, Any] = {"top_k": 1, "top_p": 0.1, "min_p": 0.9, "repetition_penalty": 1.5, "presence_penalty": 2.0}
    assert re.fullmatch("(ab){1,9}", write(compiler, regex("(ab){1,9}"), **cuts).text)


def of_many_ways() -> str:
    ways = range(3000)
    return "\n".join(['start: "a" (' + " | ".join(f"x{i}" for i in ways) + ")", *(f'x{i}: "b" "{i}"' for i in ways)])


@pytest.mark.parametrize(
    ("grammar", "message"),
    [("start: /(a/", None), (of_many_ways(), "cannot be constrained any further")],
    ids=["not compiled", "too complex"],
)
def test_a_constraint_that_does_not_compile_or_becomes_too_complex_fails_its_own_reply(
    compiler: ConstraintCompiler, grammar: str, message: str | None
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        write(compiler, Constraint(kind="lark", source=grammar))
    assert write(compiler, regex("a")).text == "a"


def test_a_mask_that_is_too_complex_is_no_end_of_the_reply(
    compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "diskprefix.daemon.engine.constraints.constraint_grammar.limits", lambda _: LLParserLimits(step_lexer_fuel=10)
    )
    with pytest.raises(InvalidRequest, match=r"cannot be constrained any further: lexer error[^\n]*$"):
        write(compiler, regex("a(.*a.{10}b|c)"), likely="aab")


# What cannot be compiled.

OBJECT = {"type": "object", "additionalProperties": False}


def refusal(compiler: ConstraintCompiler, kind: Any, source: str) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        compiler.check_constraint(Constraint(kind=kind, source=source), param="format.it")
    error = caught.value
    assert error.message.startswith(f"{error.param}: ")
    assert "\n" not in error.message
    assert len(error.message) < 500
    return error


@pytest.mark.parametrize(
    ("wanted", "place", "message"),
    [
        ({"type": "array", "uniqueItems": True}, "", "uniqueItems"),
        ({"properties": {"a": {"items": {"not": {}}}}}, ".properties.a.items", "not"),
        ({"properties": {"a": {"anyOf": [{}, {"type": "flot"}]}}}, ".properties.a.anyOf.1", "flot"),
        ({"properties": {"a": {"pattern": "(?=x)"}}}, ".properties.a", "look"),
        ({"$defs": {"d": {"contains": {}}}, "properties": {"a": {"$ref": "#/$defs/d"}}}, ".$defs.d", "contains"),
        (
            {"$defs": {"d": {}}, "items": {"properties": {"a": {"$ref": "#/$defs/d"}, "b": {"not": {}}}}},
            ".items.properties.b",
            "not",
        ),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, ".properties.a", "none"),
        ({"properties": {"a": {"$ref": "https://example.com/a"}}}, ".properties.a", "example.com"),
        ({"properties": {"a": {"format": "no-such"}}}, ".properties.a", "no-such"),
        ({"properties": {"a": {"minLength": -1}}}, ".properties.a", "minLength"),
        (
            {**OBJECT, "properties": {"a": {"type": "integer", "minimum": 2, "maximum": 1}}, "required": ["a"]},
            ".properties.a",
            "minimum",
        ),
        ({"properties": {"a": {"oneOf": [{"type": "object"}, {}]}}}, ".properties.a", "oneOf"),
        ({"properties": {"a": {"type": "object", "minProperties": 2}}}, ".properties.a", "minProperties"),
        ({"properties": 3}, "", "properties"),
        ({"properties": {"a": {}, "b": {"uniqueItems": True}, "c": {"uniqueItems": True}}}, ".properties.b", "unique"),
        ({"x-guidance": {"lenient": True}, "uniqueItems": True}, "", "uniqueItems"),
        (False, "", "object"),
    ],
    ids=json.dumps,
)
def test_a_schema_that_cannot_be_compiled_is_refused_with_its_place(
    compiler: ConstraintCompiler, wanted: Any, place: str, message: str
) -> None:
    error = refusal(compiler, "json_schema", json.dumps(wanted))
    assert error.param == f"format.it{place}"
    assert message in error.message


MULTIPLES = {"type": "integer", "multipleOf": 99_999, "minimum": 0, "maximum": 1e18}
"""Its grammar is compiled, and no reply gets further than one digit."""


@pytest.mark.parametrize("first", [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}], ids=json.dumps)
def test_a_schema_whose_replies_would_break_off_is_refused_with_its_place(
    compiler: ConstraintCompiler, first: JsonSchema
) -> None:
    properties = {f"p{number}": first for number in range(5)} | {"n": MULTIPLES}
    wanted = OBJECT | {"properties": properties, "required": [*properties]}
    error = refusal(compiler, "json_schema", json.dumps(wanted))
    assert error.param == "format.it.properties.n"
    assert "is too complex for the text of a reply" in error.message


def multiples(seed: int) -> JsonSchema:
    rng = random.Random(seed)
    number: JsonSchema = {"type": "integer", "multipleOf": int(10 ** rng.uniform(3, 5))}
    for key, low, high in (("minimum", 0, 6), ("maximum", 7, 18)):
        if rng.random() < 0.7:
            number[key] = int(10 ** rng.uniform(low, high))
    before = {"type": "object", "properties": {"a": {"type": "string"}, "n": number}, "required": ["a", "n"]}
    return rng.choice([number, before])


@pytest.mark.cases(4)
@pytest.mark.parametrize("seed", range(40))
def test_what_a_trial_accepts_can_be_written(compiler: ConstraintCompiler, seed: int) -> None:
    """Half of these schemas are compiled, but break their replies off."""
    constraint = schema(multiples(seed))
    is_accepted = False
    with suppress(InvalidRequest):
        compiler.check_constraint(constraint, param="it")
        is_accepted = True
    for reply in range(3 if is_accepted else 0):
        write(compiler, constraint, seed=1000 * seed + reply, max_tokens=100)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_schema", "{"),
        ("json_schema", '"text"'),
        ("json_schema", '{"enum": [NaN]}'),
        ("choice", "[]"),
        ("choice", '["a", 1]'),
        ("choice", "a"),
        ("lark", ""),
        ("lark", "start: missing"),
        ("lark", "start: /(a/"),
        ("lark", "start: <|no_such_token|>"),
    ],
)
def test_what_cannot_be_read_is_refused(compiler: ConstraintCompiler, kind: Any, source: str) -> None:
    assert refusal(compiler, kind, source).param == "format.it"


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "object", "properties": {"a": {"type": "array", "items": {"$ref": "#"}}}, "required": ["a"]},
        {"type": ["object", "null"], "required": ["a"], "minProperties": 1, "title": "t", "x-mine": 1, "default": {}},
        {**OBJECT, "description": "d", "deprecated": True, "examples": [{}], "$comment": "c"},
        {"type": "integer"},
        {},
    ],
    ids=json.dumps,
)
def test_what_schemas_of_tools_hold_is_compiled(compiler: ConstraintCompiler, wanted: Any) -> None:
    compiler.check_constraint(schema(wanted), param="format.it")


DEEP = 100_000
REFUSED = {
    "deep lists": ("json_schema", '{"enum": ' + "[" * DEEP + "]" * DEEP + "}", "nested too deeply"),
    "deep schema": ("json_schema", '{"items": ' * 5000 + "{}" + "}" * 5000, "nested too deeply"),
    "a schema too deep for llguidance": ("json_schema", '{"items": ' * 300 + "{}" + "}" * 300, "recursion"),
    "reference to itself": ("json_schema", '{"$ref": "#"}', "no text satisfies it"),
    "references in a circle": (
        "json_schema",
        '{"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}',
        "no text satisfies it",
    ),
    "a product of choices": (
        "json_schema",
        json.dumps({"allOf": [{"anyOf": [{"minimum": i}, {"maximum": i}]} for i in range(30)]}),
        "too large",
    ),
    "a proof that takes minutes": (
        "json_schema",
        json.dumps({"allOf": [{"type": "string", "pattern": f"^.*a.{{{i}}}b.*$"} for i in range(30)]}),
        "too complex to be compiled",
    ),
    "pattern of many states": ("json_schema", json.dumps({"pattern": "((a{1000}){1000}){1000}"}), "repeats something"),
    "deep pattern": ("json_schema", json.dumps({"pattern": "(" * DEEP + "a" + ")" * DEEP}), "nested"),
    "too long": ("choice", json.dumps(["a" * 1000] * 1000), "characters; at most"),
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", REFUSED)
def test_hostile_constraints_are_refused(compiler: ConstraintCompiler, name: str) -> None:
    kind, source, message = REFUSED[name]
    assert message in refusal(compiler, kind, source).message


PATTERNS: dict[str, Any] = {f"^a{{{i}}}.*b{{{i}}}$": {} for i in range(1, 2001)}
LIMITED = {
    ".items.patternProperties": {"items": {"patternProperties": PATTERNS}},
    ".allOf": {"allOf": [{}] * 100},
    ".items.pattern": {"items": {"type": "string", "pattern": "(x[(]{3}|((a{100}){100}){100})*"}},
    ".patternProperties.(a{1000}){1000}": {"patternProperties": {"(a{1000}){1000}": {}}},
    "": {"anyOf": [{"const": i} for i in range(20_000)]},
}


@pytest.mark.parametrize("place", LIMITED)
def test_what_is_too_much_is_refused_by_its_number_with_its_place(compiler: ConstraintCompiler, place: str) -> None:
    error = refusal(compiler, "json_schema", json.dumps(LIMITED[place]))
    assert error.param == f"format.it{place}"
    assert re.search(r"\d+", error.message)


@pytest.mark.parametrize(
    ("pattern", "times"),
    [
        ("", 1),
        ("a*b+c?", 1),
        ("a{7}|b{9}", 9),
        ("((a{2}){3}|b{4}){5}", 30),
        ("a{2}{3}", 6),
        ("(a{2,}){,4}(b{3,5})", 8),
        (r"\(a{3}\){4}", 4),
        (r"[({\]]{3}[^)]{2}", 3),
        ("(a{0}){9}", 9),
        ("a{99999999999999999999}", 100_001),
        ("{}{a}{{2}", 2),
        (")))a{2}", 2),
    ],
)
def test_repetitions_in_repetitions_are_multiplied(pattern: str, times: int) -> None:
    assert repeated(pattern) == times


def test_of_several_schemas_the_one_at_fault_is_named(compiler: ConstraintCompiler) -> None:
    bad = {"properties": {"z": {"uniqueItems": True}}}
    with pytest.raises(InvalidRequest) as caught:
        compiler.check_constraint(
            Constraint(kind="lark", source=f"start: a\na: %json {json.dumps(bad)}"),
            param="tools",
            parts={"tools.0.parameters": "{}", "tools.1.parameters": json.dumps(bad)},
            strict=["tools.1.parameters"],
        )
    assert caught.value.param == "tools.1.parameters.properties.z"


def test_the_server_of_trials_ends_when_nothing_comes_and_another_is_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    imports = "import sys; from diskprefix.daemon.engine.constraints import trial"
    serving = f"{imports}; trial._IDLE_S = 0.2; trial.serve(int(sys.argv[1]))"
    monkeypatch.setattr("diskprefix.daemon.engine.constraints.trial._SERVER", serving)
    compiler = ConstraintCompiler(tiny.tokenizer(), {EOS}, VOCAB)
    for source in ('["ab"]', '["cd"]'):
        compiler.check_constraint(Constraint(kind="choice", source=source), param="it")
        server = compiler._trials._server
        assert server is not None
        assert server.wait(60) == 0
    compiler.close()
    assert not caplog.records


def test_a_trial_whose_server_was_killed_is_made_again(compiler: ConstraintCompiler) -> None:
    compiler.check_constraint(Constraint(kind="choice", source='["ab"]'), param="it")
    server = compiler._trials._server
    assert server is not None
    server.kill()
    compiler.check_constraint(Constraint(kind="choice", source='["cd"]'), param="it")
    assert compiler._trials._server is not server


LARGE = {
    "long text": ("json_schema", '{"minLength": 1000000000, "type": "string"}'),
    "long list": ("json_schema", '{"minItems": 1000000000, "type": "array"}'),
    "pattern that counts back": ("json_schema", json.dumps({"type": "string", "pattern": "(.*a.{500}){20}"})),
    "many choices": ("choice", json.dumps([f"option {i}" for i in range(3000)])),
    "many names": ("json_schema", json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(500)}})),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_constraints_are_compiled(compiler: ConstraintCompiler, name: str) -> None:
    kind, source = LARGE[name]
    compiler.check_constraint(Constraint(kind=kind, source=source), param="format.it")  # type: ignore[arg-type]


TAGS = ["a</tool_call>b", "<tool_call>", "x<|im_end|>y<|im_start|>", '"</tool_call>\\n']


@pytest.fixture(scope="module")
def tagged() -> Iterator[ConstraintCompiler]:
    """A compiler for a tokenizer whose tags are added tokens."""
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    compiler = ConstraintCompiler(tokenizer, {EOS}, VOCAB)
    yield compiler
    compiler.close()


@pytest.mark.parametrize("text", TAGS)
@pytest.mark.parametrize("kind", ["const", "enum", "literal", "choice", "text"])
def test_a_text_that_holds_the_letters_of_a_special_token_is_written_with_plain_tokens(
    tagged: ConstraintCompiler, kind: str, text: str
) -> None:
    """llguidance forced the special token for these letters, and then refused it."""
    wanted, constraint = {
        "const": (json.dumps(text), schema({"const": text})),
        "enum": (json.dumps(text), schema({"enum": [text, f"{text}or"]})),
        "literal": (text, Constraint(kind="lark", source=f"start: {json.dumps(text)}")),
        "choice": (text, Constraint(kind="choice", source=json.dumps([text]))),
        "text": (json.dumps(text), schema({"type": "string"})),
    }[kind]
    tokens = [token for letter in wanted for token in tiny.tokenizer()(letter, add_special_tokens=False)["input_ids"]]
    reply = tagged.begin_reply(constraint)
    for token in tokens:
        assert not mask_of(reply)[token]
        assert reply.accept_token(token)
    assert reply.is_complete or kind == "enum"
    special = tagged.begin_reply(schema({"type": "string", "minLength": 1}))
    assert not mask_of(special)[quote := tiny.tokenizer().convert_tokens_to_ids('"')]
    assert special.accept_token(quote)
    assert all(mask_of(special)[tagged.tokens_of(tag)[0]] for tag in ("</tool_call>", "<|im_end|>"))


BIG = 2**53 + 1
EXACT: list[tuple[Any, list[Any], list[Any]]] = [
    ({"const": BIG}, [BIG], [BIG - 1]),
    ({"enum": [1, "a", -BIG, 10**30, [BIG]]}, [1, "a", -BIG, 10**30, [BIG]], [-BIG - 1, 10**30 + 1, [BIG + 1]]),
    (
        {
            "type": "object",
            "properties": {
                "id": {"type": "integer", "const": BIG},
                "to": {"$ref": "#/$defs/to"},
                "n": {"type": "null"},
            },
            "required": ["to"],
            "additionalProperties": False,
            "$defs": {"to": {"type": "array", "items": {"anyOf": [{"enum": [BIG, BIG + 2]}, {"type": "string"}]}}},
        },
        [{"to": []}, {"id": BIG, "to": [BIG, "x", BIG + 2]}, {"to": [BIG + 2], "n": None}],
        [{"id": BIG}, {"to": [BIG + 1]}, {"id": BIG + 1, "to": []}],
    ),
    (
        {"type": "array", "prefixItems": [{"const": BIG}, {"type": "boolean"}], "items": False, "minItems": 1},
        [[BIG], [BIG, True]],
        [[], [BIG + 1], [BIG, True, True]],
    ),
    ({"type": "integer", "minimum": BIG, "maximum": BIG + 10}, [BIG + 1, BIG + 3], [BIG - 1, BIG + 11]),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [0, -(10**18), 2**62], [2**63, -(2**63) - 1]),
    ({"type": "integer", "exclusiveMinimum": 0, "maximum": 2**64 - 1}, [1, 10**18], [0, 2**64]),
]


@pytest.mark.parametrize(("wanted", "taken", "refused"), EXACT, ids=lambda value: json.dumps(value)[:60])
@pytest.mark.parametrize("kind", ["json_schema", "lark"])
def test_integers_beyond_a_double_keep_their_digits(
    compiler: ConstraintCompiler, kind: str, wanted: Any, taken: list[Any], refused: list[Any]
) -> None:
    source = json.dumps(wanted) if kind == "json_schema" else f'start: "x" it\nit: %json {json.dumps(wanted)}\n'
    constraint = Constraint(kind=cast("Any", kind), source=source)
    compiler.check_constraint(constraint, param="it")
    for value in taken + refused:
        text = ("x" if kind == "lark" else "") + json.dumps(value)
        tokens, matcher = compiler.tokenizer.tokenize_str(text), compiler.matcher(constraint)
        fits = matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens)
        assert (fits and matcher.is_accepting()) == (value in taken), text


@pytest.mark.parametrize(
    ("wanted", "place"),
    [
        ({"items": {"allOf": [{"const": BIG}, {"type": "integer"}]}}, ".items"),
        ({"properties": {"a": {"patternProperties": {"^x": {"const": BIG}}}}}, ".properties.a"),
        ({"properties": {"a": {"multipleOf": BIG}}}, ".properties.a"),
        ({"items": {"items": [{"const": BIG}]}}, ".items"),
        ({"prefixItems": 5, "items": {"const": BIG}}, ""),
        ({"items": {"const": BIG}, "minItems": "1"}, ""),
        ({"items": {"const": BIG}, "maxItems": [1]}, ""),
    ],
)
def test_an_integer_that_cannot_keep_its_digits_is_refused(
    compiler: ConstraintCompiler, wanted: Any, place: str
) -> None:
    error = refusal(compiler, "json_schema", json.dumps(wanted))
    assert error.param == f"format.it{place}"


A, B = ({"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in "ab")
UNIONS: list[tuple[list[Any], bool]] = [
    ([{"type": "string"}, {"type": ["integer", "null"]}], True),
    ([{"type": "integer"}, {"type": "number"}], False),
    ([{"enum": [1, 2]}, {"const": 3}], True),
    ([{"enum": [1, 2]}, {"const": 2.0}], False),
    ([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], True),
    ([{"$ref": "#/$defs/a"}, {"type": "object", "properties": {"kind": {"const": "b"}}}], True),
    ([{"required": ["a"], "type": "object"}, {"required": ["b"], "type": "object"}], False),
    ([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], False),
    ([{"$ref": "#/$defs/loop"}, {"type": "string"}], False),
    ([{"const": number} for number in range(1000)], True),
    ([{"const": 1}, {"enum": [2, 1.0]}], False),
]


@pytest.mark.parametrize(("branches", "differ"), UNIONS, ids=json.dumps)
def test_one_of_is_any_of_where_no_value_fits_two_branches(
    compiler: ConstraintCompiler, branches: list[Any], differ: bool
) -> None:
    definitions = {"a": A, "b": B, "loop": {"$ref": "#/$defs/loop"}}
    wanted = {"$defs": definitions, "properties": {"x": {"oneOf": branches, "discriminator": {"propertyName": "kind"}}}}
    if not differ:
        assert str(refusal(compiler, "json_schema", json.dumps(wanted)).param).startswith("format.it.properties.x")
    else:
        compiler.check_constraint(schema(wanted), param="format.it")


def holding_itself(kind: str) -> JsonSchema:
    names = [f"p{number}" for number in range(20)]
    properties = {name: {"$ref": f"#/$defs/{kind}"} for name in names}
    return {"type": "object", "properties": properties, "required": names}


ENDLESS: dict[str, JsonSchema] = {
    "definitions that hold themselves": {
        "$defs": {kind: holding_itself(kind) for kind in "ab"},
        "oneOf": [{"$ref": f"#/$defs/{kind}"} for kind in "ab"],
    },
    "thousands of branches": {"oneOf": [{"const": [number]} for number in range(100_000)]},
    "long lists behind references": {
        "$defs": {"a": {"type": ["string"] * 30_000, "enum": ["x"] * 30_000}},
        "oneOf": [{"type": "object"}] * 200 + [{"$ref": "#/$defs/a"}, {"type": ["string"] * 30_000}],
    },
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", ENDLESS)
def test_a_proof_that_would_take_hours_is_given_up(name: str) -> None:
    wanted = ENDLESS[name]
    for only_proven in (False, True):
        changed, wider = with_any_of(wanted, only_proven=only_proven)
        assert wider == [("oneOf",)]
        assert changed.get("oneOf" if only_proven else "anyOf") == wanted["oneOf"]


def test_a_definition_that_holds_a_large_integer_is_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked, values = list[Any](), kept_schema._values

    def counted(part: JsonSchema) -> list[Any]:
        looked.append(part)
        return values(part)

    monkeypatch.setattr(kept_schema, "_values", counted)
    definitions: JsonSchema = {str(number): {"items": {"$ref": f"#/$defs/{number + 1}"}} for number in range(20)}
    properties = {f"p{number}": {"$ref": "#/$defs/0"} for number in range(100)}
    wanted = {"$defs": definitions | {"20": {"const": BIG}}, "properties": properties}
    assert len(kept_schema.json_rules("start", wanted)) > 100
    assert len(looked) < 1000


TEXT = {"type": "string"}
ONE = {"type": "object", "required": ["a"]}
LOOSE: list[tuple[Any, Any, list[str]]] = [
    ({"type": "array", "items": TEXT, "uniqueItems": True}, {"type": "array", "items": TEXT}, ["uniqueItems"]),
    ({"properties": {"a": {"not": {}}, "b": TEXT}}, {"properties": {"a": {}, "b": TEXT}}, ["properties.a", "not"]),
    ({"type": "object", "if": {}, "then": {}, "required": ["a"]}, {"type": "object", "required": ["a"]}, ["if"]),
    ({"items": TEXT | {"pattern": "(?=a)b"}}, {"items": TEXT}, ["items", "look"]),
    ({"items": TEXT | {"format": "zip"}}, {"items": TEXT}, ["items", "zip"]),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, {"anyOf": [{"type": "number"}, {"type": "integer"}]}, []),
    ({"items": {"$ref": "#/$defs/no"}, "maxItems": 2}, {"items": {}, "maxItems": 2}, ["items"]),
    (ONE | {"properties": {"a": TEXT | {"minLength": 3, "maxLength": 1}}}, ONE | {"properties": {"a": TEXT}}, ["minL"]),
    ({"type": "object", "minProperties": 3}, {"type": "object"}, ["minProperties"]),
    (
        {"$defs": {"d": {"not": {}}}, "items": {"$ref": "#/$defs/d"}},
        {"$defs": {"d": {}}, "items": {"$ref": "#/$defs/d"}},
        [],
    ),
    ({"items": {"allOf": [{"const": BIG}]}}, {"items": {}}, ["items", "digits"]),
    ({"type": "weird"}, {}, ["weird"]),
    (
        {"type": "array", "items": MULTIPLES | {"multipleOf": 9_999}, "minItems": 1},
        {"type": "array", "items": {"type": "integer"}, "minItems": 1},
        ["items", "text of a reply"],
    ),
    ({"properties": {"a": {"pattern": "((a{1000}){1000}){9}"}}}, {"properties": {"a": {}}}, ["properties.a"]),
]


@pytest.mark.parametrize(("wanted", "kept", "said"), LOOSE, ids=lambda value: json.dumps(value)[:50])
def test_what_a_grammar_cannot_hold_of_a_tool_is_left_out_unless_it_is_strict(
    compiler: ConstraintCompiler, wanted: Any, kept: Any, said: list[str]
) -> None:
    constraint = Constraint(kind="lark", source=f"start: a\na: %json {json.dumps(wanted)}")
    parts = {"tools.0": "{}", "tools.1": json.dumps(wanted)}
    loosened = compiler.check_constraint(constraint, param="tools", parts=parts)
    assert list(loosened) == ["tools.1"]
    assert json.loads(loosened["tools.1"].schema) == kept
    assert all(word in " ".join(loosened["tools.1"].left_out) for word in said)
    compiler.check_constraint(schema(kept), param="it")
    with pytest.raises(InvalidRequest, match=r"^tools\.1"):
        compiler.check_constraint(constraint, param="tools", parts=parts, strict=["tools.1"])


def test_a_schema_of_which_no_part_compiles_is_loosened_to_any_value(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = list[object]()

    def fault(_tokenizer: object, schema: object) -> tuple[tuple[str, ...], str]:
        rounds.append(schema)
        assert len(rounds) < 20, "it does not end"
        return (), "no text satisfies it"

    monkeypatch.setattr(constraint_grammar, "_fault", fault)
    assert constraint_grammar.loosened(None, json.dumps(ONE)).schema == "{}"  # type: ignore[arg-type]


def test_a_strict_schema_is_refused_where_the_grammar_does_not_hold_all_of_it(compiler: ConstraintCompiler) -> None:
    """Arguments with tags of their own are compiled one by one."""
    with pytest.raises(InvalidRequest, match=r"^tools\.0: .*not"):
        compiler.check_constraint(regex("a"), param="tools", parts={"tools.0": '{"not": {}}'}, strict=["tools.0"])
