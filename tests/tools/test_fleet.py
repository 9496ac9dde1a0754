"""Machines on one bucket: each token comes from one place, and the bucket is asked as the tier asks it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tools.benchmarks.fleet import Fleet, fleets, row_of, run_day, turns_of

SMALL = Fleet(machines=20, conversations=60, agents=3, repositories=8)


@pytest.mark.parametrize("label", fleets(SMALL))
def test_each_token_is_restored_or_computed_and_the_bucket_only_adds_hits(label: str) -> None:
    fleet = fleets(replace(SMALL, conversations=20))[label]
    day, alone = run_day(fleet), run_day(replace(fleet, uses_bucket=False))
    for counts in (day, alone):
        assert counts["disk"] + counts.get("bucket", 0) + counts["computed"] == counts["sent"]
    assert day["sent"] == alone["sent"]
    assert day["computed"] <= alone["computed"]
    assert not {"get", "get_missing", "head", "put"} & alone.keys()
    assert day["written"] == day["put"] * fleet.object_bytes or fleet.block_bytes < 4 << 20
    # What is read was written before, as whole objects.
    assert day.get("bucket", 0) * fleet.object_bytes <= day.get("read", 0) * 256


def test_turns_that_move_cost_reads_and_win_more_than_turns_that_stay() -> None:
    moving, staying = (row_of(replace(SMALL, stays=stays), "") for stays in (0.0, 1.0))
    assert moving["alone"] < staying["alone"]
    assert moving["with_bucket"] - moving["alone"] > staying["with_bucket"] - staying["alone"]
    assert moving["get"] > staying["get"]
    assert moving["pays_above"] < staying["pays_above"]


def test_a_prompt_that_nobody_sent_costs_few_requests() -> None:
    """Without objects in the bucket: the first one, and the end of a prompt."""
    alone = replace(SMALL, machines=1, conversations=1, turns=1.0, agents=1, repositories=1)
    (first, second) = turns_of(alone)
    assert first.blocks[0] == second.blocks[0]
    day = run_day(replace(alone, machines=10_000))
    assert day["get_missing"] <= 3
    assert day.get("put", 0) == 0


def test_a_day_is_the_same_each_time() -> None:
    assert run_day(SMALL) == run_day(SMALL)
