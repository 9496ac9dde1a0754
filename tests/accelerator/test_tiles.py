"""The sizes of tiles by device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from diskprefix.accelerator import tiles

NAMES = ("NVIDIA H100 80GB HBM3", "NVIDIA L4")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Two GPUs: the numbers of those whose name is asked for."""
    numbers = list[int]()

    def name_of(device: torch.device) -> str:
        numbers.append(device.index)
        return NAMES[device.index]

    monkeypatch.setattr(torch.cuda, "get_device_name", name_of)
    tiles.sizes_of.cache_clear()
    yield numbers
    tiles.sizes_of.cache_clear()


def test_a_device_is_asked_for_its_name_once_and_has_its_own_sizes(asked: list[int]) -> None:
    found = [[tiles.sizes_of(torch.device("cuda", number)) for number in (0, 1)] for _ in range(3)]
    assert asked == [0, 1]
    assert found == [[tiles._MEASURED["NVIDIA H100"], tiles._OTHERS]] * 3
