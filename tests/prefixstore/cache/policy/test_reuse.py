"""How many blocks of a kind come again, and after what time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diskprefix.prefixstore.cache.policy.reuse import ReuseTimes, kind_of_new, kind_of_used

KIND = kind_of_new(5, continues=False)
OTHER = kind_of_new(5, continues=True)


def counted(*ages_s: float, kind: int = KIND, of: int = 1000) -> ReuseTimes:
    """So many prompts of ten blocks, some of which come again at these ages."""
    reuse = ReuseTimes()
    for number in range(of):
        reuse.begin_trials(kind, 10)
        if number < len(ages_s):
            reuse.end_trials(kind, ages_s[number], 10)
    return reuse


def test_kinds_have_as_many_blocks_or_came_again_as_often() -> None:
    sizes = [kind_of_new(n, continues=False) for n in (0, 1, 2, 3, 4, 7, 8, 1 << 40)]
    assert sizes == sorted(sizes)
    assert (len({*sizes}), sizes[2] == sizes[3], sizes[4] == sizes[5]) == (6, True, True)
    used = [kind_of_used(n) for n in (1, 2, 3, 4, 8, 1 << 40)]
    assert (len({*used}), used[1] == used[2], used[4] == used[5]) == (4, True, True)
    assert not {*sizes, *(kind_of_new(n, continues=True) for n in range(9))} & {*used}


def test_before_anything_was_seen_half_of_all_are_expected_and_more_the_longer_they_stay() -> None:
    shares = [ReuseTimes().share(KIND, within_s) for within_s in (0.0, 60.0, 3600.0, 1e6, math.inf)]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 0.5)


def test_an_unknown_kind_is_expected_to_be_like_the_others() -> None:
    assert counted(*[60.0] * 1000).share(OTHER, 90.0) == pytest.approx(1.0, abs=0.02)
    assert counted().share(OTHER, math.inf) == pytest.approx(0.0, abs=0.02)


def test_a_share_is_of_blocks_and_not_of_prompts() -> None:
    reuse = ReuseTimes()
    for _ in range(1000):
        reuse.begin_trials(KIND, 1)
        reuse.end_trials(KIND, 5.0, 1)
        reuse.begin_trials(KIND, 9)
    assert reuse.num_prompts(KIND) == 2000
    assert reuse.measured_share(KIND) == 0.1
    assert reuse.share(KIND, 10.0) == pytest.approx(0.1, abs=0.01)


@given(st.lists(st.floats(0.0, 1e8), max_size=30), st.floats(0.0, 1e8))
def test_those_that_come_again_later_are_told_apart_to_a_tenth_of_the_time(
    ages_s: list[float], within_s: float
) -> None:
    """Against the ages themselves."""
    of, reuse = 3000, counted(*ages_s, of=3000)
    surely = sum(age_s * 1.1 + 1.0 < within_s for age_s in ages_s) / of
    perhaps = sum(age_s < within_s * 1.1 + 1.0 for age_s in ages_s) / of
    assert surely * 0.99 - 1e-9 <= reuse.share(KIND, within_s) <= perhaps + 0.5 * 16 / of


def test_older_prompts_count_less() -> None:
    reuse = counted(*[60.0] * 4000, of=4000)
    for _ in range(30_000):
        reuse.begin_trials(KIND, 10)
    assert reuse.share(KIND) < 0.02


def test_a_clock_that_goes_back_or_jumps_is_no_error() -> None:
    reuse = counted(-1e9, 1e30, of=2)
    assert 0.0 < reuse.share(KIND, 1.5) < reuse.share(KIND) <= 1.0
