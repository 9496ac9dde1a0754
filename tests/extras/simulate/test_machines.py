"""A workload on several machines with a shared tier: what each fetches and puts, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from diskprefix.extras.simulate import machines as module
from diskprefix.extras.simulate.baselines import upper_bound
from diskprefix.extras.simulate.geometry import SLICEABLE, TOKEN, Geometry
from diskprefix.extras.simulate.machines import WRITE_RULES, MachinesRow, Setup, WriteRule, replay, setups
from diskprefix.extras.simulate.object_store import SimulatedBucket
from diskprefix.extras.simulate.simulator import Policy, simulate
from diskprefix.extras.simulate.spread import SPREADS, Spread
from diskprefix.extras.simulate.synthetic import CATALOG, interleaved
from diskprefix.extras.simulate.trace import Trace, TraceRequest
from diskprefix.nouns import Prompt, Scope

MIB = 1 << 20
BLOCK = 16
LARGE = Geometry(bytes_per_token=MIB)
"""A block is 16 MiB: an object of its own."""
TO_THE_TOKEN = replace(LARGE, exact_at="token")
POLICY = Policy(scope=Scope("full"), block_size=BLOCK, min_tokens=BLOCK)
SHARED = (1, 2 * BLOCK + 3)
"""What prompts begin with: two blocks, and three tokens."""


def asked(*parts: tuple[int, int], when: float = 0.0, **how: Any) -> TraceRequest:
    """A prompt of messages, each given as its token and its length."""
    token_ids = np.concatenate([np.full(length, token, np.int32) for token, length in parts])
    return TraceRequest(when=when, prompt=Prompt(token_ids), **how)


def on(
    requests: list[TraceRequest],
    write: WriteRule,
    *,
    machines: int = 2,
    spread: Spread = "conversation",
    policy: Policy = POLICY,
    geometry: Geometry = LARGE,
) -> MachinesRow:
    """Each conversation of `requests` goes to the next machine."""
    setup = Setup(machines=machines, spread=spread, write=write)
    return replay(Trace.of("t", requests), setup, policy, geometry)


def told(row: MachinesRow) -> tuple[int, int, int, int, int]:
    """Tokens restored, tokens fetched, and the requests at the object store."""
    traffic = row.store.traffic
    return row.totals.restored_tokens, row.fetched_tokens, traffic.heads, traffic.gets, traffic.puts


TWO = [asked(SHARED, (2, 20), when=1.5), asked(SHARED, (3, 20), when=2.5)]
"""Of 55 tokens each: three full blocks, two of which they share. Each on a machine of its own."""


def test_without_a_tier_a_machine_knows_its_own_prompts_only() -> None:
    row = on(TWO, "off")
    assert told(row) == (0, 0, 0, 0, 0)
    assert (row.busiest, row.seconds, row.store.sizes) == (1, 2.5, {})
    assert on(TWO, "off", machines=1).totals.restored_tokens == 2 * BLOCK


def test_what_one_machine_puts_another_fetches() -> None:
    row = on(TWO, "all")
    # The first: is block 0 there? Then it puts all three, which it knows to be missing. The second: 0, 2 and 1
    # are asked for; two are read, and the third is put.
    assert told(row) == (2 * BLOCK, 2 * BLOCK, 1 + 3, 2, 3 + 1)
    traffic = row.store.traffic
    assert (traffic.got_bytes, traffic.put_bytes) == (2 * BLOCK * MIB, 4 * BLOCK * MIB)
    assert (dict(traffic.reads_at), dict(traffic.writes_at)) == ({1: 1, 2: 5}, {1: 3, 2: 1})
    assert row.store.stored_bytes == 4 * BLOCK * MIB


def test_what_a_machine_fetched_it_has() -> None:
    again = asked(SHARED, (3, 20), when=3.5)
    row = on([*TWO, again], "all")
    # The repeat on the second machine is restored whole from its own store: of its three blocks none is asked for.
    assert told(row) == (2 * BLOCK + 55, 2 * BLOCK, 4, 2, 4)


def test_seen_twice_is_put_when_a_second_prompt_has_it() -> None:
    first, second = TWO
    apart = asked((9, 50), when=1.6)
    assert told(on([first, second], "seen-twice")) == (0, 0, 2, 0, 0), "each machine has seen it once"
    # The third conversation goes to the first machine, which has the two blocks. It asks for the block behind
    # them and for the first of them, and puts both. The fourth fetches them.
    third, fourth = asked(SHARED, (4, 20), when=3.0), asked(SHARED, (5, 20), when=4.0)
    row = on([first, apart, third, fourth], "seen-twice")
    heads = 1 + 1 + (1 + 1) + 3
    assert told(row) == (2 * BLOCK + 2 * BLOCK, 2 * BLOCK, heads, 2, 2)


def test_what_another_machine_has_put_is_not_put_again() -> None:
    first, second = TWO
    both = [first, second, asked(SHARED, (4, 20)), asked(SHARED, (5, 20))]
    row = on(both, "seen-twice")
    assert row.store.traffic.puts == len(row.store.sizes) == 2


def test_a_reply_that_another_machine_has_put_is_asked_for_first() -> None:
    whole, beginning = (
        asked((1, 3 * BLOCK), group=b"a"),
        asked((1, 2 * BLOCK), reply=np.full(20, 1, np.int32), group=b"b"),
    )
    row = on([whole, beginning], "all", geometry=TO_THE_TOKEN)
    assert (row.fetched_tokens, row.store.traffic.puts) == (2 * BLOCK, 3)


def test_only_what_a_machine_has_saved_is_put() -> None:
    row = on(TWO[:1], "all", policy=replace(POLICY, scope=Scope("tokens", BLOCK)))
    assert row.store.traffic.puts == 1


def test_a_request_that_only_reads_is_no_second_sighting() -> None:
    first, second = TWO
    assert on([first, second], "seen-twice", machines=1).store.traffic.puts == 2
    for reading in (replace(second, save=False), replace(second, remembered=False)):
        assert on([first, reading], "seen-twice", machines=1).store.traffic.puts == 0


def test_small_blocks_are_bundled() -> None:
    geometry = Geometry(bytes_per_token=MIB // 8)
    """A block is 2 MiB, and an object two blocks."""
    row = on([asked((1, 5 * BLOCK)), asked((1, 5 * BLOCK), (2, 3))], "all", geometry=geometry, spread="tenant")
    assert (row.store.traffic.puts, set(row.store.sizes.values())) == (2, {2 * BLOCK * MIB // 8})
    # Of the second prompt, which parts in the middle of the second object, its first block is read.
    apart = [asked((1, 5 * BLOCK)), asked((1, 4 * BLOCK), (2, 20))]
    row = on(apart, "all", geometry=geometry)
    assert told(row)[:2] == (4 * BLOCK, 4 * BLOCK)
    apart = [asked((1, 5 * BLOCK)), asked((1, 3 * BLOCK), (2, 40))]
    assert told(on(apart, "all", geometry=geometry))[:2] == (2 * BLOCK, 2 * BLOCK), "an object is named by all it has"


def test_one_token_is_left_to_compute_where_prompts_restore_to_blocks() -> None:
    whole = [asked((1, 2 * BLOCK), (2, 9)), asked((1, 2 * BLOCK), when=1.0)]
    assert told(on(whole, "all"))[:2] == (BLOCK, BLOCK)
    assert told(on(whole, "all", geometry=TO_THE_TOKEN))[:2] == (2 * BLOCK - 1, 2 * BLOCK)


def test_replies_go_to_the_tier_where_their_state_is_kept() -> None:
    reply = np.full(30, 7, np.int32)
    on_two = [asked((1, 20), reply=reply, group=b"a"), asked((1, 20), (7, 30), (2, 5), group=b"b")]
    assert on(on_two, "all", geometry=TO_THE_TOKEN).fetched_tokens == 48
    assert on(on_two, "all").fetched_tokens == 16


@pytest.mark.parametrize("how", [{"save": False}, {"remembered": False}, {"scope": Scope("off")}])
def test_who_does_not_save_puts_nothing(how: dict[str, Any]) -> None:
    first, second = TWO
    assert told(on([replace(first, **how), second], "all"))[:2] == (0, 0)


def test_off_fetches_nothing() -> None:
    first, second = TWO
    row = on([first, replace(second, scope=Scope("off"))], "all")
    assert told(row) == (0, 0, 1, 0, 3)


@pytest.mark.parametrize("geometry", [TOKEN, SLICEABLE])
@pytest.mark.parametrize("name", CATALOG)
def test_a_tier_never_restores_less_and_never_more_than_all_that_is_shared(name: str, geometry: Geometry) -> None:
    trace, policy = CATALOG[name](num_requests=40), Policy(scope=Scope("full"))
    bound = upper_bound(trace, policy, geometry).restored_tokens
    alone = simulate(trace, policy, geometry)
    for spread in SPREADS[:2]:
        found = [replay(trace, setup, policy, geometry) for setup in setups([4], [spread], WRITE_RULES)]
        restored = [row.totals.restored_tokens for row in found]
        assert restored == sorted(restored)
        assert restored[-1] <= bound
        assert all(row.totals.requests == 40 and row.totals.prompt_tokens == alone.prompt_tokens for row in found)


@pytest.mark.parametrize("write", WRITE_RULES)
def test_one_machine_is_the_daemon_alone(write: WriteRule) -> None:
    trace, policy = interleaved(num_requests=60), Policy(scope=Scope("auto", 30))
    row = replay(trace, Setup(machines=1, spread="random", write=write), policy, TOKEN)
    assert row.totals == simulate(trace, policy, TOKEN)
    assert row.fetched_tokens == 0


def test_objects_of_a_prompt_are_put_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a search may skip some: before an object that is stored, none is missing."""
    parents: dict[bytes, bytes] = {}

    class Noting(SimulatedBucket):
        def find(self, names: Any, now: float) -> int:
            parents.update(zip(names[1:], names, strict=False))
            return super().find(names, now)

        def put(self, name: bytes, num_bytes: int, now: float) -> None:
            assert name not in parents or parents[name] in self.sizes
            super().put(name, num_bytes, now)

    monkeypatch.setattr(module, "SimulatedBucket", Noting)
    for setup in setups([3], ["random"], WRITE_RULES[1:]):
        small = Policy(scope=Scope("full"), budget_bytes=400 * MIB)
        assert replay(interleaved(num_requests=120), setup, small, SLICEABLE).store.sizes


def test_setups_are_all_that_differ() -> None:
    found = setups([1, 2], SPREADS, WRITE_RULES)
    assert len(found) == 3 + 9
    assert {setup.spread for setup in found if setup.machines == 1} == {"random"}
