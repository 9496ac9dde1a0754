"""What the engine knows of a model beside its weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from transformers import AutoTokenizer

from diskprefix.engine.served_model import _eos_ids
from tests.server.chat_model import write_tokenizer


@pytest.mark.parametrize(("listed", "known"), [(None, {2}), (0, {0, 2}), ([0, 1], {0, 1, 2})])
def test_a_token_that_ends_a_call_ends_the_reply_though_the_model_does_not_list_it(
    listed: Any, known: set[int], tmp_path: Path
) -> None:
    write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_tokens(["<|call|>"], special_tokens=True)
    model = cast(Any, SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=listed)))
    assert _eos_ids(model, tokenizer) == known | {tokenizer.convert_tokens_to_ids("<|call|>")}
