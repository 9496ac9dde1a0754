"""Constrained replies, sampled from random logits: the hardest text, because nothing in them helps the grammar."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLParserLimits

from diskprefix.engine.constrained_reply import ConstraintCompiler, forbidden_by
from diskprefix.engine.request import Constraint, FreeText, SamplingParams
from diskprefix.engine.sampler import Sampler
from diskprefix.errors import InvalidRequest
from tests.model import tiny
from tests.random_schemas import random_schema

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
    sampler = Sampler(sampling, PROMPT, torch.device("cpu"), constraint=compiler.begin_reply(constraint))
    tokens: list[int] = []
    while len(tokens) < max_tokens and not sampler.is_complete and EOS not in tokens:
        logits = torch.randn(VOCAB, generator=generator)
        if len(tokens) < len(wanted):
            logits[wanted[len(tokens)]] += 50
        tokens.append(sampler.sample(logits))
    return Reply(tokenizer.decode(tokens, skip_special_tokens=True), tokens, sampler.is_complete or EOS in tokens)


def schema(value: Any) -> Constraint:
    return Constraint(kind="json_schema", source=json.dumps(value))


def regex(pattern: str, **kwargs: Any) -> Constraint:
    return Constraint(kind="lark", source=f"start: /{pattern}/", **kwargs)


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
        (regex(r"(ab|c){2,5}-\d+"), r"(ab|c){2,5}-\d+"),
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


def test_json_object_lets_any_object_be_written(compiler: ConstraintCompiler) -> None:
    text = '{"a": [1, {"b": null}], "c": "é"}'
    assert write(compiler, Constraint(kind="json_object", source=""), likely=text).text == text
    assert write(compiler, Constraint(kind="json_object", source=""), likely="[1]", max_tokens=1).text == "{"


def test_a_reply_ends_only_where_its_constraint_lets_it(compiler: ConstraintCompiler) -> None:
    reply = write(compiler, regex("abc(def)*"), likely="ab", temperature=0)
    assert reply.text == "abc" or reply.text.startswith("abcdef")
    assert write(compiler, regex("abc(def)*"), likely="abc").tokens[-1] == EOS


def test_a_reply_that_can_only_end_is_complete_without_an_end_token(compiler: ConstraintCompiler) -> None:
    reply = write(compiler, regex("abc"))
    assert reply.text == "abc"
    assert EOS not in reply.tokens


def test_white_space_between_values_is_bounded(compiler: ConstraintCompiler) -> None:
    reply = write(compiler, schema({"type": "array", "items": {"const": 1}, "minItems": 1}), likely="[" + " " * 500)
    assert len(reply.text) - len("".join(reply.text.split())) < 100


def test_masks_are_computed_on_threads_of_their_own_as_soon_as_a_token_is_known(
    compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: SimpleQueue[str] = SimpleQueue()

    def noted(*args: Any) -> torch.Tensor:
        computed.put(threading.current_thread().name)
        return forbidden_by(*args)

    monkeypatch.setattr("diskprefix.engine.constrained_reply.forbidden_by", noted)
    reply = compiler.begin_reply(regex("[ab]{3}"))
    a = tiny.tokenizer().convert_tokens_to_ids("a")
    for _ in range(2):
        # Nobody has asked for this mask.
        assert computed.get(timeout=60).startswith("masks")
        assert not reply.forbidden()[a]
        assert reply.accept(a)


def test_a_seed_repeats_a_reply(compiler: ConstraintCompiler) -> None:
    constraint = regex("[a-z]{20}")
    first = write(compiler, constraint, seed=3)
    assert first == write(compiler, constraint, seed=3)
    assert first != write(compiler, constraint, seed=4)


# Free text before.


@pytest.mark.parametrize("end", ["</think>", "X", "é😀"])
def test_the_constraint_begins_behind_the_end_of_free_text(compiler: ConstraintCompiler, end: str) -> None:
    free = "I can say anything: {}[] <|"
    reply = write(compiler, regex("[0-9]{4}", before=FreeText(end=end)), likely=free + end + "free no more")
    assert re.fullmatch(re.escape(free + end) + "[0-9]{4}", reply.text)


def test_a_reply_does_not_end_in_its_free_text(compiler: ConstraintCompiler) -> None:
    reply = write(compiler, regex("ab", before=FreeText(end="Z")), likely="free", temperature=0, max_tokens=4000)
    assert EOS not in reply.tokens[:-1]
    assert re.fullmatch("free.*Zab", reply.text, re.DOTALL)
    assert reply.text.count("Z") == 1


def test_a_special_token_ends_free_text_too(compiler: ConstraintCompiler) -> None:
    reply = write(compiler, regex("[0-9]{4}", before=FreeText(end="<|im_start|>")), likely="abc<|im_start|>abc")
    assert re.fullmatch("abc[0-9]{4}", reply.text)


@pytest.mark.parametrize(("pattern", "pieces"), [("l[0-9]", ["he", "ll"]), ("[0-9]{2}", ["he", "l"])])
def test_a_token_may_end_free_text_only_if_the_constraint_accepts_the_rest_of_it(
    compiler: ConstraintCompiler, pattern: str, pieces: list[str]
) -> None:
    """`he` and `ll` are tokens. The free text ends in the middle of `ll`, and `l` is the next best."""
    ids = tiny.tokenizer().convert_tokens_to_ids(["he", "ll", "l"])
    allowed = compiler.begin_reply(regex(pattern, before=FreeText(end="hel")))
    sampler = Sampler(SamplingParams(temperature=0), PROMPT, torch.device("cpu"), constraint=allowed)
    logits = torch.zeros(2, VOCAB)
    logits[0, ids[0]] = 9
    logits[1, ids[1:]] = torch.tensor([9.0, 8.0])
    assert [sampler.sample(row) for row in logits] == tiny.tokenizer().convert_tokens_to_ids(pieces)
    rest = [sampler.sample(torch.zeros(VOCAB)) for _ in range(3 - len(pieces[1]))]
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


def test_a_tag_that_has_begun_is_not_left_for_what_the_constraint_forbids(compiler: ConstraintCompiler) -> None:
    before = FreeText(begin="<think>", end="</think>")
    reply = write(compiler, regex("t?[0-9]{4}", before=before), likely="<t1234", max_tokens=7)
    assert reply.text == "<think>"


def test_a_constrained_text_may_end_where_a_tag_could_go_on(compiler: ConstraintCompiler) -> None:
    constraint = regex("<(th)?", before=FreeText(begin="<think>", end="</think>"))
    assert write(compiler, constraint, likely="<").text == "<"
    assert write(compiler, constraint, likely="<th").text == "<th"


# What goes wrong.


def test_a_bias_that_forbids_all_that_is_allowed_is_the_requests_fault(compiler: ConstraintCompiler) -> None:
    a, b = (tiny.tokenizer().convert_tokens_to_ids(letter) for letter in "ab")
    with pytest.raises(InvalidRequest, match="sampling parameters leave no finite score"):
        write(compiler, regex("[ab]"), logit_bias={a: -torch.inf, b: -torch.inf})
    assert write(compiler, regex("[ab]"), logit_bias={a: -torch.inf}).text == "b"


def test_penalties_and_cuts_keep_what_is_allowed(compiler: ConstraintCompiler) -> None:
    cuts: dict[str, Any] = {"top_k": 1, "top_p": 0.1, "min_p": 0.9, "repetition_penalty": 1.5, "presence_penalty": 2.0}
    assert re.fullmatch("(ab){1,9}", write(compiler, regex("(ab){1,9}"), **cuts).text)


def test_logprobs_are_the_models_own_under_a_constraint(compiler: ConstraintCompiler) -> None:
    sampling = SamplingParams(logprobs=1, temperature=0)
    sampler = Sampler(sampling, PROMPT, torch.device("cpu"), constraint=compiler.begin_reply(regex("a")))
    logits = torch.arange(VOCAB, dtype=torch.float32)
    (item,) = sampler.logprobs(logits, sampler.sample(logits))
    assert item.logprob == pytest.approx(float(logits.log_softmax(-1)[item.token_id]))
    assert item.top[0].token_id == VOCAB - 1


def test_a_constraint_that_does_not_compile_fails_its_own_reply(compiler: ConstraintCompiler) -> None:
    with pytest.raises(InvalidRequest):
        write(compiler, regex("(a"))
    assert write(compiler, regex("a")).text == "a"


def test_a_constraint_that_becomes_too_complex_fails_its_own_reply(compiler: ConstraintCompiler) -> None:
    ways = range(3000)
    grammar = "\n".join(['start: "a" (' + " | ".join(f"x{i}" for i in ways) + ")", *(f'x{i}: "b" "{i}"' for i in ways)])
    with pytest.raises(InvalidRequest, match="cannot be constrained any further"):
        write(compiler, Constraint(kind="lark", source=grammar))


def test_a_mask_that_is_too_complex_is_no_end_of_the_reply(
    compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diskprefix.engine.constraint_grammar.LIMITS", LLParserLimits(step_lexer_fuel=10))
    with pytest.raises(InvalidRequest, match=r"cannot be constrained any further: lexer error[^\n]*$"):
        write(compiler, regex("a(.*a.{10}b|c)"), likely="aab")
