"""What identifies weights in memory, and what tells that they were changed."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from diskprefix.errors import ModelError
from diskprefix.model import weights
from diskprefix.model.weights import memory_bytes, memory_digest, stamp
from tests.runner import DEVICES, tiny_llama


def digest(model: PreTrainedModel) -> str:
    return memory_digest(model, lambda _: None)


def test_equal_weights_have_one_digest_and_others_another() -> None:
    assert digest(tiny_llama()) == digest(tiny_llama())
    assert len({digest(tiny_llama()), digest(tiny_llama(seed=1)), digest(tiny_llama(torch.float32))}) == 3


@pytest.mark.parametrize("device", DEVICES)
def test_a_digest_does_not_depend_on_where_the_weights_are(device: str) -> None:
    model = tiny_llama()
    before = digest(model)
    model.to(device)
    model.lm_head.weight.data = model.lm_head.weight.data.t().contiguous().t()
    assert digest(model) == before


@pytest.mark.parametrize("piece_bytes", [64, 1 << 20])
def test_every_part_of_every_tensor_counts(piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_PIECE_BYTES", piece_bytes)
    model = tiny_llama()
    before = digest(model)
    for tensor in [*model.parameters(), *model.buffers()]:
        for index in (0, -1):
            value = tensor.data.flatten()[index].clone()
            tensor.data.view(-1)[index] = value + 1
            assert digest(model) != before
            tensor.data.view(-1)[index] = value
    assert digest(model) == before


def test_tied_weights_are_read_once() -> None:
    model = tiny_llama()
    untied = memory_bytes(model)
    model.lm_head.weight = model.model.embed_tokens.weight
    told: list[int] = []
    memory_digest(model, told.append)
    assert told[-1] == memory_bytes(model) == untied - model.lm_head.weight.nbytes
    assert told == sorted(told)


def test_weights_that_are_not_in_memory_have_no_digest() -> None:
    model = tiny_llama().to("meta")
    with pytest.raises(ModelError, match="cannot be read as they are"):
        digest(model)


def test_a_stamp_tells_writes_and_replacements_but_no_reads() -> None:
    model = tiny_llama()
    before = stamp(model)
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))
        assert stamp(model) == before
        model.lm_head.weight[0, 0] += 1
    written = stamp(model)
    assert written != before
    model.lm_head.weight.data = model.lm_head.weight.data.clone()
    assert stamp(model) != written
