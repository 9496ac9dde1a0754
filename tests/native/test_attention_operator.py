"""The compiled attention: right, and the same bits for a row in every company, for each variant of this CPU."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from diskprefix.kv.sizes import TILE
from diskprefix.kv.step import Run
from diskprefix.model.exact.patterns import Pattern
from diskprefix.native import library
from tests.model.exact.test_attention import Case, Layer, plain, random_steps, together
from tests.native.variants import WITH_PAIRS, of_this_cpu

ERRORS = {torch.float32: 3e-6, torch.bfloat16: 0.03, torch.float16: 2e-3}
LENGTH = TILE + 44
"""Three tiles of the operator, the last one not full. No longer, as `tools/arm64` emulates this."""
SMALL = Case(key_dim=32, value_dim=32, length=LENGTH)
CASES = {
    "groups of three": replace(SMALL, heads=9, kv_heads=3, key_dim=64, value_dim=64),
    "groups of seven": replace(SMALL, heads=7, kv_heads=1, key_dim=64, value_dim=64),
    "one group of many heads": replace(SMALL, heads=34, kv_heads=1, key_dim=16, value_dim=16),
    "window and soft cap": replace(SMALL, pattern=Pattern(window=270), softcap=2.0),
    "chunks": replace(SMALL, pattern=Pattern(chunk=270), scaling=0.3),
    "soft cap and sinks": replace(SMALL, softcap=2.0, sinks=True),
    "sinks and window": replace(SMALL, pattern=Pattern(window=24), sinks=True),
    "keys of three vectors and values of two and a half": replace(SMALL, heads=6, key_dim=96, value_dim=80),
    "no groups, and values of another size, which fill no vector": replace(SMALL, kv_heads=4, key_dim=27, value_dim=18),
}
OF_ALL_VARIANTS = tuple(CASES)[::3]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@cache
def layers(name: str, dtype: torch.dtype) -> tuple[Layer, torch.Tensor]:
    """A layer behind whose end there is nothing finite, and its attention by the textbook."""
    layer = Layer.of(replace(CASES[name], dtype=dtype))
    layer.keys[:, :, LENGTH:] = layer.values[:, :, LENGTH:] = float("nan")
    return layer, plain(layer)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy())


def names_for(variant: str, dtype: torch.dtype) -> tuple[str, ...]:
    """Returns the layers that a variant is tested with: fewer where its code is that of a variant before it."""
    has_own_code = variant in (*WITH_PAIRS, "neon_bf16") and dtype == torch.bfloat16
    return tuple(CASES) if has_own_code or variant == of_this_cpu()[0] else OF_ALL_VARIANTS


@pytest.mark.parametrize(
    ("operators", "dtype", "name"),
    [
        pytest.param(variant, dtype, name, id=f"{variant}-{dtype}-{name}")
        for variant in of_this_cpu()
        for dtype in ERRORS
        for name in names_for(variant, dtype)
    ],
    indirect=["operators"],
)
@pytest.mark.usefixtures("operators")
def test_it_is_attention_with_the_same_bits_in_every_step(name: str, dtype: torch.dtype) -> None:
    layer, expected = layers(name, dtype)
    whole = layer.cut([LENGTH])
    assert (whole.double() - expected).abs().max() < ERRORS[dtype]
    for steps in (random_steps(1, LENGTH), [256, 256, LENGTH - 512]):
        assert bits(layer.cut(steps)) == bits(whole), steps
    alone = [layer.attended(Run(LENGTH - 20 + i, 1)) for i in range(20)]
    assert bits(torch.cat(alone)) == bits(whole[-20:])


@pytest.mark.usefixtures("operators")
def test_a_row_has_the_same_bits_beside_other_sequences() -> None:
    one, other = (Layer.of(replace(SMALL, heads=6), seed=seed) for seed in (1, 2))
    runs = [(other, Run(40, 1)), (one, Run(520, 1)), (other, Run(255, 130)), (one, Run(10, 33))]
    assert bits(together(runs)) == bits(torch.cat([layer.attended(run) for layer, run in runs]))


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_rows", [1, 200])
def test_the_number_of_threads_changes_no_bit(num_rows: int, dtype: torch.dtype) -> None:
    layer, _ = layers("groups of three", dtype)
    found = set()
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        found.add(bits(layer.attended(Run(LENGTH - num_rows, num_rows))))
    assert len(found) == 1


@pytest.mark.usefixtures("operators")
def test_memory_may_begin_where_the_window_does() -> None:
    layer = Layer.of(replace(SMALL, pattern=Pattern(window=20)))
    run = Run(TILE + 30, 10)
    assert bits(layer.attended(run, first=TILE)) == bits(layer.attended(run))


@pytest.mark.usefixtures("operators")
def test_a_row_with_a_score_that_is_no_number_is_none_in_any_company() -> None:
    layer = Layer.of(replace(SMALL, dtype=torch.float32))
    layer.keys[:, :, 300] = float("nan")
    whole = layer.cut([LENGTH])
    assert whole[:300].isfinite().all()
    assert whole[300:].isnan().all()
    assert all(layer.attended(Run(position, 1)).isnan().all() for position in range(300, 332))


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("dims", [(-3, -2), (-2, -1)])
def test_rows_may_lie_anywhere_in_memory(dims: tuple[int, int]) -> None:
    layer = Layer.of(replace(SMALL, dtype=torch.float32))
    queries, keys, values = (
        memory.transpose(*dims).contiguous().transpose(*dims) for memory in (layer.queries, layer.keys, layer.values)
    )
    moved = replace(layer, queries=queries, keys=keys, values=values)
    assert bits(moved.cut([LENGTH])) == bits(layer.cut([LENGTH]))


@pytest.mark.usefixtures("operators")
def test_scores_of_any_size_give_finite_weights() -> None:
    layer = Layer.of(replace(SMALL, dtype=torch.float32))
    layer.keys.mul_(1e18)
    assert (layer.cut([LENGTH]).double() - plain(layer)).abs().max() < 1e-5


def test_there_is_one_pool_of_threads() -> None:
    library.choose("auto")
    assert library.operators() is not None
    layer, _ = layers("groups of three", torch.bfloat16)
    torch.set_num_threads(2)
    torch.ones(1 << 20).mul_(2)
    before = len(list(Path("/proc/self/task").iterdir()))
    layer.cut([LENGTH])
    # Those of a larger team, of another test, may end meanwhile.
    assert len(list(Path("/proc/self/task").iterdir())) <= before
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    assert len(loaded) == 1
