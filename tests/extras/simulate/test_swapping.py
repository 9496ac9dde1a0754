"""Several models in turn: what the front would load and unload in a recorded workload."""

from __future__ import annotations

from diskprefix.extras.front.swaps import MOST_WAITING, PATIENCE_S
from diskprefix.extras.simulate.swapping import SwapReplay, SwapTotals
from diskprefix.extras.simulate.trace import RecordedDaemon, Trace, TraceRequest
from diskprefix.nouns import Prompt
from diskprefix.tokens import as_token_ids

LOAD_S = 4.0


def replayed(limit: int, *arrivals: tuple[float, str], took_s: float = 1.0, caller: str = "") -> SwapTotals:
    """Requests for models that need 6 bytes each, of a caller for each unless one is named. All but the first token of
    a prompt are restored."""
    prompt = Prompt(as_token_ids(range(10)))
    requests = [
        TraceRequest(when=when, prompt=prompt, model=model, took_s=took_s, tenant=model, caller=caller or model)
        for when, model in arrivals
    ]
    daemon = RecordedDaemon(block_size=16, min_tokens=16, geometry=None, memory_bytes=6, load_s=LOAD_S)
    models = {model: daemon for _, model in arrivals}
    trace = Trace("day", len(requests), lambda: iter(requests), daemon, models)
    return SwapReplay(trace, limit, lambda request: len(request.prompt.token_ids) - 1).run()


def test_models_that_do_not_fit_together_are_loaded_in_turn_and_requests_wait_for_it() -> None:
    turns = [(100.0 * number, "ab"[number % 2]) for number in range(6)]
    found = replayed(10, *turns)
    assert (found.loads, found.swaps, found.waits_s) == ({"a": 3, "b": 3}, 5, [LOAD_S] * 6)
    assert (found.waited_tokens, found.waited_restored, found.restored_tokens) == (60, 54, 54)
    together = replayed(12, *turns)
    assert (together.loads, together.swaps, together.waits_s) == ({"a": 1, "b": 1}, 0, [LOAD_S] * 2)
    assert (together.waited_tokens, together.prompt_tokens) == (20, 60)


def test_a_model_that_answers_is_not_unloaded_and_takes_requests_for_a_while_only() -> None:
    found = replayed(10, (0.0, "a"), (1.0, "b"), (2.0, "a"), (1.0 + PATIENCE_S + 1, "a"), took_s=30.0)
    # The second request for `a` joins the first, the third waits behind `b`.
    free_at = LOAD_S + 30.0
    assert found.waits_s[:3] == [LOAD_S, LOAD_S - 2, free_at - 1 + LOAD_S]
    assert found.waits_s[3] == free_at + LOAD_S + 30.0 + LOAD_S - (PATIENCE_S + 2)
    assert found.wait_s(1.0) == max(found.waits_s) == found.as_dict()["wait_max_s"]


def test_a_model_for_which_there_is_never_room_or_no_place_to_wait_is_refused() -> None:
    assert replayed(5, (0.0, "a")).refused == 1
    crowd = [(1.0 + number / 10, f"m{number}") for number in range(MOST_WAITING + 2)]
    found = replayed(6, (0.0, "a"), *crowd, took_s=50.0)
    assert (found.refused, found.loads.total()) == (2, 1 + MOST_WAITING)
    alone = replayed(6, (0.0, "a"), *crowd, took_s=50.0, caller="one")
    assert (alone.refused, alone.loads.total()) == (2 + MOST_WAITING // 2, 1 + MOST_WAITING // 2)
