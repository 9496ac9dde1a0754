"""Why a prompt was not restored, and the tokens that it lost: pure functions."""

from __future__ import annotations

import numpy as np
import pytest

from diskprefix.prefixstore.cache.matching import RestoreResult
from diskprefix.prefixstore.cache.misses import lost_tokens
from diskprefix.values import Lost, MissReason, Prompt, Refused, Scope, Selection


@pytest.mark.parametrize(
    ("restored", "is_part", "refused", "cause"),
    [
        (1792, True, None, "partial"),
        (1792, True, "no_checkpoint", "partial"),
        (1792, True, "damaged", "damaged"),
        (1792, False, None, "not_stored"),
        (0, True, None, "not_stored"),
    ],
)
def test_what_a_kill_cut_off_is_not_said_to_be_evicted(
    restored: int, is_part: bool, refused: Refused | None, cause: MissReason
) -> None:
    prompt = Prompt(np.arange(2035, dtype=np.int32))
    selection = Selection(scope=Scope("full"), prompt_tokens=2035, reason="full", common=2035)
    result = RestoreResult(num_tokens=restored, matched=restored, is_part=is_part, refused=refused)
    assert lost_tokens(prompt, result, selection, None, None, 64) == (Lost(cause, 2035 - restored),)
