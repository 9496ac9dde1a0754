"""The bits of a build: those of tiny models of each family, kept by variant; they are measured once.

Variants with products in bfloat16 that no machine of ours has had (AMX, ARM64's) are not in the table. Neither are
compilers but GCC 12: `-ffp-contract=off` leaves them little to choose. `python -m tests.runtime.load.test_bits` prints
the table, on a CPU that has all of its variants.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from diskprefix.native import calls
from diskprefix.native.build import LIBRARY
from diskprefix.native.library import Operators
from diskprefix.native.matrix import Matrix
from diskprefix.runtime.load import bits
from diskprefix.runtime.load.bits import FORMS, STEPS, bits_of_build, build_of, computed, measured_bits
from diskprefix.runtime.load.tiny_models import MODELS, NAMES, VOCAB, TinyWeights
from diskprefix.runtime.plan.families.decoder import decoder
from diskprefix.runtime.plan.plan import ComputePlan
from diskprefix.runtime.plan.quants.quant_form import FILE_FORMS
from diskprefix.runtime.plan.slots import Slots
from tests.native.variants import ROWS_OF_ALL, chosen, of_this_cpu
from tests.runtime.load.test_plan_fingerprint import leaves_of

GOLDEN = {
    "dense in float32": "c4d7344856e468d4",
    "dense in bfloat16": "a25c87c0053ab42f",
    "dense in quants": "55a90d1c45676dee",
    "dense in q8": "0189ef6e8b8652be",
    "dense in few bits in float32": "231a52e2f74b696f",
    "dense in few bits in bfloat16": "ac9d2052beddd74b",
    "dense in few bits in quants": "98060b687071591e",
    "dense in few bits in q8": "181d1d5d3b873327",
    "plain in float32": "700f8d519b57199a",
    "plain in bfloat16": "ec5a0de07c7d7c05",
    "plain in quants": "6dac53942e5473bf",
    "plain in q8": "00e5e7659dad0a64",
    "mixture in float32": "5497c77db3993b84",
    "mixture in bfloat16": "014469c23286ec1d",
    "mixture in quants": "f1a7a7a52d10c92e",
    "mixture in q8": "cf0935d99ed09507",
    "mixture with sinks in float32": "4e0df9310f119428",
    "mixture with sinks in bfloat16": "b074e10d6b391329",
    "mixture with sinks in quants": "8bd6a7befd0ee856",
    "mixture with sinks in q8": "b77a71a10c8bd5cc",
    "latent in float32": "6c611a96b70992f3",
    "latent in bfloat16": "d8f156cda80653ee",
    "latent in quants": "82280d1dd8c478a9",
    "latent in q8": "e65655375cd72d3b",
    "recurrent in float32": "92dda4caf4aa7d4e",
    "recurrent in bfloat16": "c7857a7ddace5a8b",
    "recurrent in quants": "26df18a071400b59",
    "recurrent in q8": "e8f710839595d90d",
    "recurrent by numbers in float32": "9091baba5b53efb4",
    "recurrent by numbers in bfloat16": "f1034e1a967d089f",
    "recurrent by numbers in quants": "24668754bfa65849",
    "recurrent by numbers in q8": "f1034e1a967d089f",
    "streams with an indexer in float32": "fa19c670d92d2050",
    "streams with an indexer in bfloat16": "f811fbca9134befd",
    "streams with an indexer in quants": "6f91a0af9dfc94a4",
    "streams with an indexer in q8": "65ffab69a0443ee0",
    "with draft layer in float32": "cdab1b9770be8e98",
    "with draft layer in bfloat16": "21b0ba40cc73d9d3",
    "with draft layer in quants": "ad567abdec372a79",
    "with draft layer in q8": "dc95cbcb627f6b4a",
    "late gemma in float32": "08fa9f0aa71815be",
    "late gemma in bfloat16": "e07cec8e07010147",
    "late gemma in quants": "a01d431dc22bf202",
    "late gemma in q8": "8fe3c28e6671541f",
    "dense in quants, --rows 15": "afdf97e135821d8b",
    "dense in few bits in quants, --rows 15": "1c220d45f350ae66",
    "plain in quants, --rows 15": "5534cc35bbf56966",
    "mixture in quants, --rows 15": "5249d015f8cd66fd",
    "mixture with sinks in quants, --rows 15": "475c3539c810736d",
    "latent in quants, --rows 15": "f0e42cbf6b9d891d",
    "recurrent in quants, --rows 15": "27c799ff04d57e73",
    "recurrent by numbers in quants, --rows 15": "6bdad02ca1c867db",
    "streams with an indexer in quants, --rows 15": "7048570996f8744c",
    "with draft layer in quants, --rows 15": "0652dc0fd2196004",
    "late gemma in quants, --rows 15": "838ad2bed90365c5",
}
"""Digests, the same on every CPU."""
OF_15 = ", --rows 15"


@pytest.fixture
def operators() -> Operators:
    return chosen("auto")


@pytest.mark.parametrize("rows", ROWS_OF_ALL)
@pytest.mark.parametrize("variant", of_this_cpu())
def test_each_family_computes_its_golden_bits(variant: str, rows: str) -> None:
    assert kept(chosen(variant, rows)) == {name: bits for name, bits in GOLDEN.items() if is_of(name, rows)}


def kept(operators: Operators) -> dict[str, str]:
    """Returns the digests of a kind of rows by the names in `GOLDEN`. Rows make a difference with quants alone."""
    forms = [form for form in FORMS if operators.rows == "8" or form == "quants"]
    return {
        f"{name}{OF_15 if operators.rows == '15' else ''}": bits
        for name, bits in measured_bits(operators, forms).items()
    }


def is_of(name: str, rows: str) -> bool:
    return name.endswith(OF_15) == (rows == "15")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_neither_threads_nor_steps_change_bits(operators: Operators, name: str, form: str) -> None:
    rows, memory = computed(operators, MODELS[name], form)
    for steps, threads in (((sum(STEPS),), 3), ((1, 4, 13, 20), 1)):
        assert computed(operators, MODELS[name], form, steps, threads) == (rows, memory)
    # Logits of drafts are float32 in any case.
    numbers = [_floats(row, form) for row in rows[1::2]]
    assert all(np.isfinite(one).all() for one in numbers)
    assert len(set(rows[::2])) == len(rows[::2]), "rows have logits of their own"


def _floats(row: bytes, form: str) -> np.ndarray:
    if FORMS[form] == calls.FLOAT32:
        return np.frombuffer(row, np.float32)
    return (np.frombuffer(row, np.uint16).astype(np.uint32) << 16).view(np.float32)


def test_the_tiny_models_have_all_operators_and_forms(operators: Operators) -> None:
    kinds, forms = set[int](), set[object]()
    for model in MODELS.values():
        config, _, _ = model.placed(2)
        plan = ComputePlan(calls.BFLOAT16, 1, VOCAB)
        weights = TinyWeights(operators, model, calls.BFLOAT16, has_quants=True)
        decoder(plan, config, Slots(weights, config.norms, NAMES), with_hidden=True)
        kinds |= {operation.kind for operation in plan.operations}
        forms |= {one.form for made in plan.operations for one in leaves_of(made.kept) if isinstance(one, Matrix)}
    # Those of float32 have experts of another kind.
    assert kinds == set(range(calls.CHOOSE_BLOCKS + 1)) - {calls.DENSE_EXPERTS}
    # These two are packed over the grid of their kinds alone.
    assert forms >= {*FILE_FORMS.values()} - {FILE_FORMS["IQ1_S"], FILE_FORMS["IQ2_XXS"]}


@pytest.mark.usefixtures("cache")
def test_bits_are_measured_once_for_a_library_and_our_code(
    operators: Operators, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = list[str]()

    def measure(operators: Operators) -> dict[str, str]:
        measured.append(operators.variant)
        return {"a": "b"}

    monkeypatch.setattr(bits, "measured_bits", measure)
    found = bits_of_build(operators)
    assert [bits_of_build(operators), len(measured)] == [found, 1]
    other = tmp_path / "other.so"
    other.write_bytes(LIBRARY.read_bytes() + b"\0")
    for name, value in (("LIBRARY", other), ("code_digest", lambda: "another comment")):
        build = build_of(operators)
        monkeypatch.setattr(bits, name, value)
        assert build_of(operators) != build
        assert bits_of_build(operators) == found
    assert len(measured) == 3


if __name__ == "__main__":
    for rows in ROWS_OF_ALL:
        for name, digest in kept(chosen("auto", rows)).items():
            print(f'    "{name}": "{digest}",')
