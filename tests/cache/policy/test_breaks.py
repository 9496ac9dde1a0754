"""The change that broke the prefix of a prompt."""

from __future__ import annotations

import numpy as np
import pytest

from diskprefix.cache.policy.breaks import find_break, same_behind
from diskprefix.tokens import TokenIds

RANDOM = np.random.default_rng(7)


def text(num_tokens: int) -> TokenIds:
    return RANDOM.integers(0, 50_000, num_tokens, dtype=np.int32)


HEAD, REST, OTHER = text(20), text(2000), text(2000)


def prompt(*parts: TokenIds) -> TokenIds:
    return np.concatenate(parts)


def test_a_changed_line_before_text_that_is_the_same_is_a_break() -> None:
    earlier, now = prompt(HEAD, text(10), REST), prompt(HEAD, text(13), REST, text(100))
    found = find_break(now, [earlier], known=20)
    assert found is not None
    assert found.at == 20
    assert 1900 <= found.num_tokens <= 2000


def test_text_that_moved_is_found_wherever_it_stands() -> None:
    first, second = text(800), text(800)
    found = find_break(prompt(HEAD, second, first), [prompt(HEAD, first, second)], known=20)
    assert found is not None
    assert found.num_tokens >= 1500


@pytest.mark.parametrize(
    ("earlier", "now"),
    [
        (prompt(HEAD, REST), prompt(HEAD, REST, OTHER)),
        (prompt(HEAD, REST), prompt(HEAD, OTHER)),
        (prompt(HEAD, REST[:100]), prompt(HEAD, text(5), REST[:100])),
        (prompt(REST, HEAD, OTHER), prompt(REST, text(20), OTHER[:400], text(1600))),
        (prompt(HEAD, REST), prompt(HEAD, REST)),
    ],
    ids=["it continues", "another text", "a short text", "a smaller part is the same", "the same prompt"],
)
def test_other_prompts_show_no_break(earlier: TokenIds, now: TokenIds) -> None:
    assert find_break(now, [earlier], known=20) is None


def test_a_text_that_repeats_itself_counts_once() -> None:
    again = np.tile(text(32), 30)
    found = find_break(prompt(HEAD, text(10), again, text(500)), [prompt(HEAD, text(10), again)], known=20)
    assert found is None


def test_what_is_found_anyway_is_not_lost() -> None:
    """A sub-agent's prompt that shares the tools with another agent's breaks once, not in each of its turns."""
    other, own = prompt(HEAD, text(10), REST), prompt(HEAD, text(10), REST, text(50))
    turn = prompt(own, text(300))
    assert find_break(turn, [own, other], known=len(own)) is None
    assert find_break(turn, [other], known=len(own)) is None
    assert find_break(turn, [prompt(other, text(1000))], known=len(own)) is None
    assert find_break(turn, [other], known=20) is not None


def test_of_several_earlier_prompts_that_counts_which_shows_the_greatest_loss() -> None:
    earlier = [text(500), prompt(HEAD, text(10), REST[:600]), prompt(HEAD[:15], text(10), REST)]
    found = find_break(prompt(HEAD, text(10), REST), earlier, known=20)
    assert found is not None
    assert found.at == 15
    assert found.num_tokens > 1900


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (prompt(text(1), HEAD[1:], REST[:60]), 79),
        (prompt(text(20), HEAD, REST[:60]), 80),
        (prompt(text(20), HEAD[1:], REST[:30]), 0),
        (prompt(HEAD, text(60)), 0),
        (prompt(HEAD, REST[:60]), 0),
        (text(0), 0),
    ],
    ids=["the first word", "text before it", "two places", "another text", "the same", "nothing"],
)
def test_what_is_the_same_behind_one_small_difference(now: TokenIds, expected: int) -> None:
    earlier = prompt(HEAD, REST[:60])
    assert same_behind(now, earlier) == same_behind(earlier, now) == expected


def test_no_earlier_prompt_and_no_token_are_no_break() -> None:
    assert find_break(text(1000), [], known=0) is None
    assert find_break(text(0), [text(0), text(1000)], known=0) is None
