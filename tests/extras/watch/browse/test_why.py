"""Why a prompt is found, or is not: the same prompt changed as clients change it."""

from __future__ import annotations

from typing import Any

import pytest

from diskprefix.cache.policy.select import StateKind
from diskprefix.extras.request_bodies import parse_body
from diskprefix.extras.watch.browse.why import Nearest, Why, _Look, _not_kept, explain
from diskprefix.store.savings import read_savings
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.tree import list_entries
from diskprefix.tokens import LEAST_TOKENS
from tests.extras.watch.browse.saved_chats import ALICE, SYSTEM, SavedChats, chat

Json = dict[str, Any]
QUESTION = "When is high tide today?"


def why(chats: SavedChats, snapshot: Snapshot, body: Json, **options: Any) -> Why:
    parsed = parse_body(body)
    return explain(
        snapshot,
        chats.store.secret,
        parsed.prompt(chats.renderer),
        tenant=str(parsed.options.tenant),
        entries=list_entries(snapshot),
        savings=read_savings(snapshot),
        decode=chats.decode,
        **options,
    )


def test_a_prompt_that_is_stored_needs_nothing(chats: SavedChats, snapshot: Snapshot) -> None:
    found = why(chats, snapshot, chat(QUESTION))
    assert found.restored == found.prompt_tokens == found.stored
    assert (found.cause.kind, found.parting) == ("nothing", None)
    assert found.nearest is not None
    assert found.nearest.preview.endswith(QUESTION)


def test_a_conversation_that_goes_on_needs_nothing(chats: SavedChats, snapshot: Snapshot) -> None:
    body = chat(QUESTION)
    body["messages"] += [{"role": "assistant", "content": "At noon."}, {"role": "user", "content": "Thanks."}]
    found = why(chats, snapshot, body)
    assert found.cause.kind == "goes-on"
    assert found.nearest is not None
    assert found.restored == found.nearest.num_tokens


def test_a_changed_date_is_named_with_the_text_around_it(chats: SavedChats, snapshot: Snapshot) -> None:
    found = why(chats, snapshot, chat(QUESTION, SYSTEM.replace("Saturday, November 21", "Sunday, November 22")))
    assert found.cause.kind == "value"
    assert found.parting is not None
    assert found.parting.here.startswith("unday, November 22")
    assert found.parting.at == found.restored, "a model that is exact at every token restores up to there"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (chat("Another question, of tides?"), "question"),
        (chat(QUESTION, prefix_cache={"salt": "bob"}), "tenant"),
        (chat("Only there?", "Kept by an older build alone. " * 12), "build"),
        (chat("Go on.", "Another agent says other things. " * 12), "not-kept"),
        (chat("Go back.", "Another agent says other things. " * 12), "not-kept"),
        (chat(QUESTION, "A note that was not there before.\n" + SYSTEM), "inserted"),
        ({"prompt": "zebras"}, "short"),
    ],
)
def test_the_cause_is_named(chats: SavedChats, snapshot: Snapshot, body: Json, kind: str) -> None:
    assert why(chats, snapshot, body).cause.kind == kind


def test_a_prompt_that_was_never_saved_may_be_too_short_or_evicted(chats: SavedChats, snapshot: Snapshot) -> None:
    short, long = ({"prompt": "Zebras graze. " * times} for times in (3, 400))
    cause = why(chats, snapshot, short).cause
    assert ("fewer than 64 tokens" in cause.text, cause.advice) == (True, "")
    found = why(chats, snapshot, long)
    assert (found.nearest, found.cause.kind, "evicted" in found.cause.advice) == (None, "unlike", True)


def test_the_few_tokens_that_every_prompt_begins_with_make_none_alike(chats: SavedChats, snapshot: Snapshot) -> None:
    head = parse_body(chat(QUESTION)).prompt(chats.renderer).token_ids[: LEAST_TOKENS - 1].tolist()
    other = parse_body({"prompt": "Zebras graze. " * 9}).prompt(chats.renderer).token_ids.tolist()
    assert why(chats, snapshot, {"prompt": head + other}).nearest is None
    found = why(chats, snapshot, {"prompt": head})
    assert (found.stored, found.restored, found.cause.kind) == (len(head), 0, "few-tokens")


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("checkpoints", "no-checkpoint"),
        ("token_checkpoints", "no-checkpoint"),
        ("sliceable", "whole-blocks"),
        ("token", "few-tokens"),
    ],
)
def test_what_is_stored_but_not_restored_has_the_reason_of_its_kind_of_state(state: StateKind, kind: str) -> None:
    nearest = Nearest(id="", num_tokens=64, common=64, behind=0, preview="")
    assert _not_kept(_Look(64, 32, state), nearest).kind == kind


def test_of_an_evicted_prompt_the_first_tokens_may_be_stored_for_another() -> None:
    nearest = Nearest(id="", num_tokens=64, common=64, behind=0, preview="")
    assert _not_kept(_Look(8, 0, "token"), nearest).kind == "not-kept"


def test_another_text_before_much_that_is_the_same_has_advice(chats: SavedChats) -> None:
    chats.save(chat(QUESTION, SYSTEM + "The pier is long. " * 400))
    with chats.store.snapshot() as now:
        found = why(chats, now, chat(QUESTION, "You are quite another one." + SYSTEM[20:] + "The pier is long. " * 400))
    assert found.nearest is not None
    assert (found.nearest.behind > 0, found.cause.advice != "") == (True, True)


def test_of_a_short_prompt_whose_first_word_changed_the_place_is_told(chats: SavedChats) -> None:
    chats.save(chat("Who lives there?", "Gulls nest on the pier. " * 4))
    with chats.store.snapshot() as now:
        found = why(chats, now, chat("Who lives there?", "Terns nest on the pier. " + "Gulls nest on the pier. " * 3))
    assert found.nearest is not None
    assert found.parting is not None
    assert found.parting.at == found.nearest.common < LEAST_TOKENS
    assert (found.parting.here[:5], found.parting.there[:5]) == ("Terns", "Gulls")


def test_what_another_build_or_tenant_has_is_named_with_what_differs(chats: SavedChats, snapshot: Snapshot) -> None:
    build = why(chats, snapshot, chat("Only there?", "Kept by an older build alone. " * 12))
    assert build.elsewhere[0].differs == {"torch_version": ("2.12", "2.13")}
    tenant = why(chats, snapshot, chat("Which birds nest on the pier?", prefix_cache={"salt": "alice"}))
    assert (tenant.tenant, tenant.restored > 0) == (str(ALICE), True)
    assert tenant.elsewhere[0].differs["tenant"] == ("", str(ALICE))


def test_the_tools_in_another_order_are_told(chats: SavedChats) -> None:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
        for name in ("read", "write", "list")
    ]
    chats.save(chat("What is there?", tools=tools))
    with chats.store.snapshot() as snapshot:
        found = why(chats, snapshot, chat("What is there?", tools=tools[::-1]))
    assert (found.cause.kind, "tool-order=on" in found.cause.advice) == ("tool-order", True)


@pytest.mark.parametrize(
    "body",
    [
        {"max_tokens": 5, "system": SYSTEM, "messages": [{"role": "user", "content": QUESTION}]},
        {"instructions": SYSTEM, "input": QUESTION},
        {"instructions": SYSTEM, "input": [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]},
    ],
    ids=["messages", "responses", "responses with items"],
)
def test_a_body_of_any_api_is_the_same_prompt(chats: SavedChats, snapshot: Snapshot, body: Json) -> None:
    found = why(chats, snapshot, body)
    assert found.restored == found.prompt_tokens
