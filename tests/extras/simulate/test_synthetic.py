from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from diskprefix.extras.simulate.synthetic import BEGIN, CATALOG, END, edits, interleaved, moving_reminder, shared_anchor
from diskprefix.extras.simulate.trace import TraceRequest
from diskprefix.tokens import common_prefix_length


def best_match(requests: Sequence[TraceRequest], index: int) -> int:
    """The longest prefix that the prompt shares with an earlier one, in tokens."""
    token_ids = requests[index].prompt.token_ids
    return max((common_prefix_length(token_ids, other.prompt.token_ids) for other in requests[:index]), default=0)


def shared(requests: Sequence[TraceRequest]) -> float:
    """The share of prompt tokens that an earlier prompt begins with too."""
    return sum(best_match(requests, i) for i in range(len(requests))) / sum(
        len(request.prompt.token_ids) for request in requests
    )


def continues(requests: Sequence[TraceRequest], index: int) -> bool:
    """Whether a whole earlier prompt is the prompt's beginning."""
    token_ids = requests[index].prompt.token_ids
    earlier = [other.prompt.token_ids for other in requests[:index]]
    return any(common_prefix_length(token_ids, other) == len(other) for other in earlier)


@pytest.mark.parametrize("name", CATALOG)
def test_the_same_seed_makes_the_same_trace_and_another_seed_another(name: str) -> None:
    trace, other = CATALOG[name](seed=3, num_requests=20), CATALOG[name](seed=4, num_requests=20)
    assert (trace.name, len(trace), len(list(trace))) == (name, 20, 20)
    for again in (trace, CATALOG[name](seed=3, num_requests=20)):
        pairs = list(zip(trace, again, strict=True))
        assert all(np.array_equal(a.prompt.token_ids, b.prompt.token_ids) and a.when == b.when for a, b in pairs)
    differ = [not np.array_equal(a.prompt.token_ids, b.prompt.token_ids) for a, b in zip(trace, other, strict=True)]
    assert all(differ)


@pytest.mark.parametrize("name", CATALOG)
def test_a_longer_trace_begins_with_the_shorter_one(name: str) -> None:
    pairs = zip(CATALOG[name](num_requests=5), CATALOG[name](num_requests=20), strict=False)
    assert all(np.array_equal(a.prompt.token_ids, b.prompt.token_ids) and a.when == b.when for a, b in pairs)


@pytest.mark.parametrize("name", CATALOG)
def test_prompts_have_the_structure_of_rendered_chats(name: str) -> None:
    requests = list(CATALOG[name](num_requests=20))
    for request in requests:
        prompt = request.prompt
        markers = np.isin(prompt.token_ids, (BEGIN, END))
        assert prompt.token_ids.dtype == np.int32
        assert prompt.boundaries == tuple((np.flatnonzero(markers) + 1).tolist())
        assert prompt.boundaries.index(prompt.system_end) == 2, "behind the system message and the next opening marker"
        assert prompt.token_ids[0] == BEGIN
        assert prompt.boundaries[-1] == len(prompt.token_ids) - 2, "it ends with the opening of a reply"
        assert request.output_tokens > 0
    assert all(a.when < b.when for a, b in pairwise(requests))


def test_anchored_prompts_share_their_system_message_and_no_more() -> None:
    requests = list(shared_anchor(num_requests=30))
    matches = {best_match(requests, i) for i in range(1, 30)}
    # The opening of the user's message, too, and a first token by chance.
    assert min(matches) >= requests[0].prompt.system_end
    assert max(matches) <= requests[0].prompt.system_end + 3


def test_interleaved_conversations_grow() -> None:
    requests = list(interleaved(num_requests=60, conversations=3))
    grown = [continues(requests, i) for i in range(60)]
    first_messages = {request.prompt.token_ids[: request.prompt.boundaries[3]].tobytes() for request in requests}
    assert 60 - sum(grown) == len(first_messages), "all but the first request of each conversation"
    assert 3 < len(first_messages) < 20, "what ends is replaced"


def test_a_reminder_keeps_every_prompt_from_being_continued() -> None:
    requests = list(moving_reminder(num_requests=60))
    assert not any(continues(requests, i) for i in range(60))
    assert shared(requests) > 0.7


def test_an_edit_parts_a_prompt_from_its_conversation_in_the_middle() -> None:
    requests = list(edits(num_requests=100))
    grown = sum(continues(requests, i) for i in range(100))
    assert 0.5 < grown / 100 < 0.85
    assert sum(continues(list(edits(num_requests=100, edited=0.0)), i) for i in range(100)) > grown


def test_documents_are_found_again_in_part() -> None:
    requests = list(CATALOG["retrieval"](num_requests=100))
    matches = [best_match(requests, i) for i in range(1, 100)]
    end = requests[0].prompt.system_end
    assert min(matches) >= end
    assert any(match > end + 200 for match in matches)
    assert any(match <= end + 3 for match in matches)
    first_documents = Counter(r.prompt.token_ids[end : r.prompt.boundaries[3]].tobytes() for r in requests)
    assert first_documents.most_common(1)[0][1] > 15, "the first of thirty comes far more often than one in thirty"


def test_one_off_prompts_share_nothing_but_their_first_tokens() -> None:
    requests = list(CATALOG["one-off"](num_requests=50))
    assert max(best_match(requests, i) for i in range(50)) <= 5
