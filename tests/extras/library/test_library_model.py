"""What identifies weights in memory, and what tells that they were changed."""

from __future__ import annotations

import pytest
import torch

from diskprefix.errors import ModelError
from diskprefix.extras.library import library_model as weights
from diskprefix.extras.library.library_model import memory_digest, stamp
from tests.devices import DEVICES
from tests.runner import tiny_llama


@pytest.mark.parametrize("device", DEVICES)
def test_a_digest_does_not_depend_on_where_the_weights_are(device: str) -> None:
    model = tiny_llama()
    before = memory_digest(model)
    model.to(device)
    model.lm_head.weight.data = model.lm_head.weight.data.t().contiguous().t()
    assert memory_digest(model) == before


@pytest.mark.parametrize("piece_bytes", [64, 1 << 20])
def test_every_part_of_every_tensor_counts(piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_PIECE_BYTES", piece_bytes)
    model = tiny_llama()
    before = memory_digest(model)
    for tensor in [*model.parameters(), *model.buffers()]:
        for index in (0, -1):
            value = tensor.data.flatten()[index].clone()
            tensor.data.view(-1)[index] = value + 1
            assert memory_digest(model) != before
            tensor.data.view(-1)[index] = value
    assert memory_digest(model) == before


def test_tied_weights_are_read_once() -> None:
    model = tiny_llama()
    untied = sum(tensor.nbytes for _, tensor in weights._distinct(model))
    model.lm_head.weight = model.model.embed_tokens.weight
    assert sum(tensor.nbytes for _, tensor in weights._distinct(model)) == untied - model.lm_head.weight.nbytes


def test_weights_that_are_not_in_memory_have_no_memory_digest() -> None:
    model = tiny_llama().to("meta")
    with pytest.raises(ModelError, match="cannot be read as they are"):
        memory_digest(model)


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
