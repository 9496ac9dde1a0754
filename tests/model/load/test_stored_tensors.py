"""Tensors that are not read behave like those that are, and what transformers makes of them is read into its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from diskprefix.model.load import stored_tensors as module
from diskprefix.model.load.stored_tensors import StoredTensor, UnreadTensor, read_now, stored_tensors

Operation = Callable[..., Any]

NOTED: dict[str, Operation] = {
    "all": lambda t: [t[0][...], t[1].detach(), t[2].to("cpu")],
    "cast": lambda t: [t[0].to(torch.bfloat16), torch.stack(t).to(torch.float64)],
    "experts": lambda t: torch.cat([torch.stack(t), torch.stack(t[::-1])], dim=1),
    "experts one after the other": lambda t: torch.cat([torch.stack(t), torch.stack(t[:1])]),
    "joined columns": lambda t: torch.cat(t, dim=-1),
    "stacked at the end": lambda t: torch.stack(t, dim=2),
    "chunks": lambda t: torch.cat(t).chunk(5),
    "chunks of a cast": lambda t: [one.contiguous() for one in torch.split(t[0].to(torch.bfloat16), [1, 4, 1])],
    "chunks of the stacked": lambda t: torch.stack(t).chunk(2),
    "columns apart": lambda t: torch.split(torch.cat(t, dim=1), 4, dim=1),
}
READ: dict[str, Operation] = {
    "columns of one": lambda t: t[0].chunk(2, dim=1),
    "turned": lambda t: t[0].t(),
    "computed": lambda t: t[0] + t[1],
    "cast twice": lambda t: t[0].to(torch.bfloat16).to(torch.float32),
    "with one that is read": lambda t: torch.stack([t[0], torch.ones(6, 4)]),
    "of two types": lambda t: torch.cat([t[0], t[1].to(torch.float64)]),
    "rows in another order": lambda t: t[0].view(2, 3, 4).transpose(0, 1).reshape(6, 4),
}


@pytest.fixture
def stored(tmp_path: Path) -> list[StoredTensor]:
    tensors = {name: torch.randn(6, 4) for name in "abc"} | {"scalar": torch.tensor(2.5), "none": torch.empty(0, 3)}
    save_file(tensors, tmp_path / "model.safetensors")
    found = stored_tensors(tmp_path, [tmp_path / "model.safetensors"])
    assert all(torch.equal(found[name].read(), tensor) for name, tensor in tensors.items())
    return [found[name] for name in "abc"]


@pytest.mark.parametrize("piece_bytes", [16, 1 << 20])
@pytest.mark.parametrize("name", [*NOTED, *READ])
def test_what_is_made_of_unread_tensors_is_what_is_made_of_read_ones(
    name: str, piece_bytes: int, stored: list[StoredTensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE_BYTES", piece_bytes)
    operation = (NOTED | READ)[name]
    found, expected = (
        (made,) if isinstance(made, torch.Tensor) else tuple(made)
        for made in (operation([one.unread() for one in stored]), operation([one.read() for one in stored]))
    )
    assert [(one.shape, one.dtype) for one in found] == [(one.shape, one.dtype) for one in expected]
    assert all(isinstance(one, UnreadTensor) == (name in NOTED) for one in found)
    assert all(torch.equal(read_now(one), other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", NOTED)
def test_what_is_noted_reads_nothing(name: str, stored: list[StoredTensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoredTensor, "read_into", lambda *_: pytest.fail("a tensor was read"))
    NOTED[name]([one.unread() for one in stored])


def test_what_cannot_be_joined_is_refused_as_ever(stored: list[StoredTensor]) -> None:
    one, other, _ = (tensor.unread() for tensor in stored)
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        torch.cat([one, torch.cat([other, other])], dim=1)
    with pytest.raises(RuntimeError, match="equal size"):
        torch.stack([one, torch.cat([other, other])])
