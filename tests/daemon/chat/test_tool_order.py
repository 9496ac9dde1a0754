"""The order of a tenant's tools: new ones go behind those that are known, and a damaged record is no record."""

from __future__ import annotations

import json
import random

import pytest

from diskprefix.daemon.chat import tool_order
from diskprefix.daemon.chat.canonicalisers import Canonicalisers, canonicalise
from diskprefix.daemon.chat.draft import PromptDraft
from diskprefix.daemon.chat.replay import RecordsUnread
from diskprefix.daemon.chat.tool_order import ToolOrder
from tests.agent_bodies import TOOLS, asked
from tests.daemon.chat.turns import Turns


def in_order(order: ToolOrder, *names: str) -> list[str]:
    return [names[index] for index in order.indices(names)]


def test_known_tools_stay_in_front_of_new_ones_however_they_are_sent() -> None:
    order, known, chosen = ToolOrder(), list[str](), random.Random(5)
    for number in range(60):
        names = sorted({*chosen.sample(known, min(len(known), 20)), f"tool_{chosen.randrange(40):02}_{number % 3}"})
        sent = chosen.sample(names, len(names))
        ordered = in_order(order, *sent)
        old = [name for name in known if name in names]
        assert ordered == [*old, *sorted(set(names) - set(old))]
        order, known = order.after(ordered), [*known, *(name for name in ordered if name not in known)]
        assert order.after(ordered) is order


def test_an_order_is_found_again_and_a_damaged_one_is_by_name() -> None:
    kept = ToolOrder().after(["z", "a"]).encode()
    assert in_order(ToolOrder.decode(kept), "a", "b", "z") == ["z", "a", "b"]
    assert b'"z"' not in kept, "names are not kept, so they need not be deleted with a prompt"
    for damaged in (None, b"", b"{", b"7", b"null", b"\xff"):
        assert ToolOrder.decode(damaged) == ToolOrder()
    assert in_order(ToolOrder.decode(json.dumps([1, None]).encode()), "b", "a") == ["a", "b"]


def test_the_orders_of_two_requests_at_once_are_one_behind_the_other() -> None:
    before = ToolOrder().after(["z"])
    one, other = before.after(["b", "c"]), before.after(["a", "c"])
    assert in_order(one.joined(other), "a", "b", "c", "z") == ["z", "b", "c", "a"]
    assert one.joined(before) is one


def test_an_order_that_is_not_in_memory_is_read_first() -> None:
    class Unread(Turns):
        def require_read(self) -> None:
            raise RecordsUnread

    draft = PromptDraft(conversation=asked(["Be brief."], "hello", tools=TOOLS), replies=Unread())
    with pytest.raises(RecordsUnread):
        canonicalise(Canonicalisers.parse("tool-order=on", param="x"), draft)
    assert canonicalise(Canonicalisers.parse("report", param="x"), draft).tool_order is None


def test_an_order_has_a_most_of_tools_and_forgets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_order, "_MAX_TOOLS", 3)
    order = ToolOrder().after(["d", "c", "b", "a"])
    assert in_order(order, "a", "b", "c", "d", "0") == ["d", "c", "b", "0", "a"]
    assert order.after(["0"]) is order
