"""The compiled experts of a mixture: what their products give one by one, to a row the same in every company."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn import functional

from diskprefix.native.compute_threads import use_threads
from diskprefix.native.library import Operators
from diskprefix.native.matrix import Matrix
from diskprefix.runtime.plan.curves import curve
from diskprefix.runtime.plan.quants.quant_form import FILE_FORMS
from tests.native.one_operation import Experts, matrix_of, pack, product
from tests.native.one_operation import matrix as plain
from tests.native.test_products import KINDS, ONE_OF_EACH_FORM, content_of, packed

EXPERTS, CHOSEN, WIDTH, INNER = 5, 3, 64, 160
"""Few experts, so that one has many rows and another none."""
MOST = 60


SILU = torch.from_numpy(curve("silu")).view(torch.bfloat16)


def experts_in(operators: Operators, kind: str) -> Experts:
    biases = torch.randn(3, EXPERTS, max(WIDTH, INNER), generator=torch.Generator().manual_seed(3)).mul_(0.1).bfloat16()
    sizes = {"gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}

    def matrix(size: tuple[int, int], seed: int, bias: torch.Tensor) -> Matrix:
        return packed(operators, kind, content_of(kind, *size, seed=seed), bias=bias[: size[0]])

    matrices = {
        part: [matrix(size, 10 * number + expert, bias) for expert, bias in enumerate(biases[number])]
        for number, (part, size) in enumerate(sizes.items())
    }
    return Experts(matrices["gate"], matrices["up"], matrices["down"], SILU)


def step(num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, the experts that each chose, and their weights. Nobody chooses expert 3."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(num_rows, WIDTH, generator=generator).bfloat16()
    chosen = torch.rand(num_rows, EXPERTS - 1, generator=generator).argsort(1)[:, :CHOSEN]
    weights = torch.rand(num_rows, CHOSEN, generator=generator)
    return rows, torch.where(chosen == 3, 4, chosen), weights


def step_by_step(
    operators: Operators, experts: Experts, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    def looked_up(curve: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return curve[numbers.view(torch.int16).to(torch.int32) & 0xFFFF]

    def compute(expert: int, some: torch.Tensor) -> torch.Tensor:
        gated = looked_up(experts.curve, product(operators, some, experts.gate[expert]))
        if experts.up:
            up = product(operators, some, experts.up[expert])
            gated = gated * (up if experts.up_curve is None else looked_up(experts.up_curve, up))
        return product(operators, gated, experts.down[expert])

    flat = chosen.reshape(-1)
    out = rows.new_empty(len(flat), rows.shape[-1])
    for expert in sorted(set(flat.tolist())):
        at = (flat == expert).nonzero()[:, 0]
        out[at] = compute(expert, rows[at // chosen.shape[1]])
    parts = (out * weights.reshape(-1, 1)).to(out.dtype).view(*weights.shape, -1).float()
    total = parts[:, 0]
    for number in range(1, weights.shape[1]):
        total = total + parts[:, number]
    return total.to(out.dtype)


def test_rows_that_share_experts_change_no_bit_of_each_other(operators: Operators) -> None:
    experts, (rows, chosen, weights) = experts_in(operators, KINDS[0]), step(MOST)
    whole, rng = experts(operators, rows, chosen, weights), random.Random(1)
    for num_threads in (1, 2):
        use_threads(num_threads)
        for count in (1, 2, 3, 16, 17, 40):
            some = torch.tensor(rng.sample(range(MOST), count))
            assert torch.equal(experts(operators, rows[some], chosen[some], weights[some]), whole[some])


@pytest.mark.parametrize("kind", ONE_OF_EACH_FORM)
def test_experts_in_every_form_that_files_have_are_those_of_their_products(operators: Operators, kind: str) -> None:
    form, content = FILE_FORMS[kind], torch.from_numpy(content_of(kind, 256, 256))
    assert form is not None

    def matrix(seed: int) -> Matrix:
        out = torch.empty(form.packed_shape(256, 256), dtype=torch.uint8)
        order = torch.randperm(256, generator=torch.Generator().manual_seed(seed)).int()
        pack(operators, kind, content, order, out)
        return matrix_of(out, form, None)

    gate, up, down = ([matrix(10 * part + expert) for expert in range(EXPERTS)] for part in range(3))
    experts = Experts(gate, up, down, SILU)
    (_, chosen, weights), rows = step(MOST), torch.randn(MOST, 256, generator=torch.Generator().manual_seed(9))
    rows = rows.mul_(0.01).bfloat16()
    whole = experts(operators, rows, chosen, weights)
    assert whole.isfinite().all()
    assert torch.equal(whole, step_by_step(operators, experts, rows, chosen, weights))
    for some in (torch.tensor([7]), torch.tensor([59, 40]), torch.tensor([40, 3, 59]), torch.arange(20, 53)):
        assert torch.equal(experts(operators, rows[some], chosen[some], weights[some]), whole[some])


def test_experts_are_added_up_in_the_order_of_the_router(operators: Operators) -> None:
    """Sums of a few numbers in bfloat16 seldom show it, so one expert is added and taken away again."""
    experts, (rows, chosen, _) = experts_in(operators, KINDS[0]), step(MOST)
    chosen[:, 2] = chosen[:, 0]
    weights = torch.tensor([[2.0**20, 1.0, -(2.0**20)]]).expand(MOST, -1)
    order = torch.tensor([0, 2, 1])
    found, turned = (experts(operators, rows, chosen[:, at], weights[:, at]) for at in (torch.arange(3), order))
    assert not torch.equal(turned, found)
    assert torch.equal(found, step_by_step(operators, experts, rows, chosen, weights))
    assert torch.equal(turned, step_by_step(operators, experts, rows, chosen[:, order], weights[:, order]))


def test_two_curves_and_experts_without_up(operators: Operators) -> None:
    whole = experts_in(operators, KINDS[0])
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    clamped = functional.pad(numbers.clamp(-0.5, 0.5) + 1, (0, 1))
    rows, chosen, weights = step(9)
    for experts in (
        Experts(whole.gate, whole.up, whole.down, whole.curve, clamped),
        Experts(whole.gate, [], whole.down, clamped),
    ):
        expected = step_by_step(operators, experts, rows, chosen, weights)
        found = experts(operators, rows, chosen, weights)
        assert torch.equal(found, expected)
        assert not torch.equal(found, whole(operators, rows, chosen, weights))


def test_experts_in_bfloat16_are_taken_as_they_lie(operators: Operators) -> None:
    both = torch.randn(EXPERTS, 2 * INNER, WIDTH, generator=torch.Generator().manual_seed(5)).mul_(0.1).bfloat16()
    last = torch.randn(EXPERTS, WIDTH, INNER, generator=torch.Generator().manual_seed(6)).mul_(0.1).bfloat16()
    gate, up, down = (
        [plain(one, (one.shape[0], one.shape[1])) for one in weight]
        for weight in (both[:, :INNER], both[:, INNER:], last)
    )
    experts, (rows, chosen, weights) = Experts(gate, up, down, SILU), step(MOST)
    found = experts(operators, rows, chosen, weights)
    assert torch.equal(found, step_by_step(operators, experts, rows, chosen, weights))
    assert all(
        torch.equal(experts(operators, rows[i : i + 1], chosen[i : i + 1], weights[i : i + 1])[0], found[i])
        for i in range(0, MOST, 7)
    )


def test_a_missing_expert_is_refused(operators: Operators) -> None:
    experts, (rows, chosen, weights) = experts_in(operators, KINDS[0]), step(3)
    for number in (EXPERTS, -1):
        chosen[1, 1] = number
        with pytest.raises(AssertionError):
            experts(operators, rows, chosen, weights)
