from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diskprefix.cache.policy.history import History
from diskprefix.tokens import TokenIds, as_token_ids

ONE, TWO = b"1" * 8, b"2" * 8
GROUPS = (b"", ONE, TWO)
PROMPTS = st.lists(
    st.tuples(st.sampled_from(GROUPS), st.lists(st.integers(0, 50_000), max_size=12).map(as_token_ids)), max_size=20
)
Grouped = list[tuple[bytes, TokenIds]]


def contents(history: History, group: bytes = b"") -> list[list[int]]:
    """Newest first."""
    return [token_ids.tolist() for token_ids in history.recent(len(history), group)]


def test_recent_gives_the_newest_first() -> None:
    history = History(10, 100)
    for first in (1, 2, 3):
        history.add(as_token_ids([first, 0]))
    assert [token_ids[0] for token_ids in history.recent(2)] == [3, 2]
    assert [token_ids[0] for token_ids in history.recent(99)] == [3, 2, 1]


@pytest.mark.parametrize("n", [0, -1])
def test_recent_gives_nothing_for_no_window(n: int) -> None:
    history = History(10, 100)
    history.add(as_token_ids([1]))
    assert history.recent(n) == ()


def test_what_is_remembered_does_not_follow_the_callers_array() -> None:
    token_ids = as_token_ids([1, 2, 3])
    history = History(10, 10)
    history.add(token_ids)
    token_ids[0] = 9
    assert contents(history) == [[1, 2, 3]]


def test_what_is_remembered_cannot_be_written_to() -> None:
    history = History(10, 10)
    history.add(as_token_ids([1, 2, 3]))
    (remembered,) = history.recent(1)
    assert remembered.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        remembered[0] = 9


def test_an_older_prompt_is_found_if_it_shares_more_than_those_of_the_window() -> None:
    history = History(10, 100)
    for token_ids in ([1, 2, 3, 4], [1, 2, 3, 9], [5, 6], [1, 2]):
        history.add(as_token_ids(token_ids))
    asked = as_token_ids([1, 2, 3, 4, 5])
    found = history.similar(asked, 2)
    assert found is not None
    assert found.tolist() == [1, 2, 3, 4]
    assert history.similar(asked, 4) is None, "it is in the window"
    assert history.similar(as_token_ids([1, 2, 7]), 2) is None, "one of the window shares as much"
    assert history.similar(as_token_ids([1, 2]), 2) is None
    assert history.similar(asked, 2, ONE) is None


def test_of_older_prompts_that_share_as_much_the_newest_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(10, 100)
    for last in (7, 8, 9):
        history.add(as_token_ids([1, 2, last]))
    found = history.similar(as_token_ids([1, 2, 3]), 0)
    assert found is not None
    assert found.tolist() == [1, 2, 9]
    monkeypatch.setattr("diskprefix.cache.policy.history._MOST_OLDER", 1)
    assert history.similar(as_token_ids([1, 2, 7]), 1) is None, "it is too old to be looked at"


@given(PROMPTS, st.integers(0, 8), st.integers(0, 40))
def test_the_windows_are_the_newest_prompts_of_all_groups_that_fit_both_bounds(
    prompts: Grouped, max_prompts: int, max_tokens: int
) -> None:
    history = History(max_prompts, max_tokens)
    for group, token_ids in prompts:
        history.add(token_ids, group)
    expected: list[tuple[bytes, list[int]]] = []
    left = max_tokens
    for group, token_ids in reversed([(g, p[:max_tokens].tolist()) for g, p in prompts if len(p[:max_tokens])]):
        if len(expected) == max_prompts or len(token_ids) > left:
            break
        expected.append((group, token_ids))
        left -= len(token_ids)
    for group in GROUPS:
        assert contents(history, group) == [token_ids for of, token_ids in expected if of == group]
    assert (history.num_bytes, len(history)) == (4 * (max_tokens - left) + 256 * len(expected), len(expected))
