"""What a mask lets a token see is found once for each kind of mask."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from diskprefix.model.exact import patterns
from diskprefix.model.exact.patterns import NotInvariant, Pattern, pattern_of


@pytest.fixture(autouse=True)
def _no_known_patterns() -> None:
    patterns._patterns.clear()


def test_a_mask_is_compared_once_however_often_its_function_is_made() -> None:
    with patch.object(patterns, "_agrees", wraps=patterns._agrees) as compared:
        for _ in range(3):
            assert pattern_of(causal_mask_function) == Pattern()
            assert pattern_of(sliding_window_causal_mask_function(64), 64) == Pattern(window=64)
        assert pattern_of(sliding_window_causal_mask_function(32), 32) == Pattern(window=32)
    assert compared.call_count == 3


def test_a_mask_that_depends_on_tensors_is_compared_each_time() -> None:
    for _ in range(patterns._MAX_PATTERNS + 1):
        assert pattern_of(chunked_causal_mask_function(16, torch.zeros(1, dtype=torch.int64)), 16) == Pattern(chunk=16)
    with pytest.raises(NotInvariant):
        pattern_of(chunked_causal_mask_function(16, torch.ones(1, dtype=torch.int64)), 16)
    assert len(patterns._patterns) <= patterns._MAX_PATTERNS
