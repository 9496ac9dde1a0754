"""The bits of a build: those of tiny models of each family, kept by variant; they are measured once.

Variants that no machine of ours has had (AMX, ARM64) are not in the table, and neither are compilers but GCC 12:
`-ffp-contract=off` leaves them little to choose. `python -m tests.model.test_bits` prints the table, on a CPU that has
all of its variants.
"""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np
import pytest

from diskprefix.model import bits
from diskprefix.model.bits import FORMS, STEPS, bits_of_build, build_of, computed, measured_bits
from diskprefix.model.families.decoder import decoder
from diskprefix.model.plan import ComputePlan
from diskprefix.model.plan_fingerprint import _leaves
from diskprefix.model.quants.quant_form import FILE_FORMS
from diskprefix.model.tiny_models import MODELS, PAGE_TOKENS, VOCAB, TinySlots
from diskprefix.native import calls, library
from diskprefix.native.build import LIBRARY
from diskprefix.native.library import Operators
from diskprefix.native.matrix import Matrix
from tests.native.variants import of_this_cpu

KEPT = ("avx512_bf16", "avx512", "avx2", "baseline") if platform.machine() == "x86_64" else ()
GOLDEN = {
    "dense in float32": "75d3d08a81c73900 75d3d08a81c73900 0f5d7f0a16ef47fc 5994e85a330b4b43",
    "dense in bfloat16": "39ab57c174e840de 3f383b9ebc72c8e1 3f383b9ebc72c8e1 3f383b9ebc72c8e1",
    "dense in quants": "1c9b513bdf1929c3 96e2ec51831e5bbb 96e2ec51831e5bbb 535099314c8468c9",
    "plain in float32": "b65b0e5826be9276 b65b0e5826be9276 2a1fe901497c4ad6 d560a6642adefc53",
    "plain in bfloat16": "5520501454f7a29e b28b15ddd5478e35 b28b15ddd5478e35 224fbd6bb165c31f",
    "plain in quants": "894f1418ee92ebc0 5f529b25ee953b55 56576bb308c4e6f3 56576bb308c4e6f3",
    "mixture in float32": "d76557f8d22c70b7 d76557f8d22c70b7 b40208cefe00e970 c12cae370d892928",
    "mixture in bfloat16": "034b2138314335f8 e1f6ab9de51925bf e1f6ab9de51925bf 19e46992010b2fae",
    "mixture in quants": "762e04cde4edf9be 11adc7b7c6f17ccc 11adc7b7c6f17ccc 1f2abb4fde084767",
    "mixture with sinks in float32": "b8ec228b5146021a b8ec228b5146021a ac6d64483c02262c 59ca30e61e8440fc",
    "mixture with sinks in bfloat16": "dce9025ba7356c52 899775ae97e613c8 899775ae97e613c8 95a28fa4db904c5a",
    "mixture with sinks in quants": "d81ae24747394556 c81b91910eff7348 c81b91910eff7348 c81b91910eff7348",
    "latent in float32": "1887d08d262324f3 1887d08d262324f3 22a831f9370b7599 cfde485fff32c634",
    "latent in bfloat16": "0977d46246206b6e 52d63648dcd20e00 52d63648dcd20e00 52d63648dcd20e00",
    "latent in quants": "bd43c0c7b7bd49e8 912fbe554d4327bc 912fbe554d4327bc ec6d75de63b8fd62",
    "recurrent in float32": "0886e88bb779c82c 0886e88bb779c82c a2f95afb455f766c 0280dfdd8657add9",
    "recurrent in bfloat16": "49242c97d5b6663d 84150de781189f5c 00d52766470277e2 277bd0f70eadb9a3",
    "recurrent in quants": "7e6a8ff4025ae891 0442f66f079a268e 4da1ab7dc43ac10d effe5a1553076d51",
    "recurrent by numbers in float32": "c8723dca54fdaaef c8723dca54fdaaef f98ba7c0cd4607c9 92f154d94a6e7c59",
    "recurrent by numbers in bfloat16": "79cfe7c7632ce8e9 0a32a845eee37f50 9e469eb09311205c 08c9aa167bf3389a",
    "recurrent by numbers in quants": "67480b56fb90c1e8 640fb9c76180d491 5f7494c29469693a c64fa043283d78c3",
    "with draft layer in float32": "a49d9790b876f285 a49d9790b876f285 d33fe74ce7176549 78a0e4476a02cad0",
    "with draft layer in bfloat16": "68d4f387723603da 852e09e4955e470e 852e09e4955e470e 852e09e4955e470e",
    "with draft layer in quants": "3822abf5694bdaae 30718747ce1ac10b a66999966a089884 30718747ce1ac10b",
    "late gemma in float32": "53187f08636dbfcf 53187f08636dbfcf 1a992fc3db1bac73 ce68f711bb99e37d",
    "late gemma in bfloat16": "47e78bf77aed6078 26ddd1d70fb3f0da 26ddd1d70fb3f0da 9e6ad63b8e26234c",
    "late gemma in quants": "13d905df97dac90a 8aed6a7b47959d1c 8aed6a7b47959d1c 78fe7f0862e18f34",
}
"""Digests, for each of the variants in `KEPT`."""


@pytest.fixture
def operators(request: pytest.FixtureRequest) -> Operators:
    library.choose(getattr(request, "param", "auto"))
    found = library.operators()
    assert found is not None
    return found


@pytest.mark.parametrize("operators", of_this_cpu(KEPT), indirect=True)
def test_each_family_computes_the_bits_that_are_kept(operators: Operators) -> None:
    kept = {name: of_variants.split()[KEPT.index(operators.variant)] for name, of_variants in GOLDEN.items()}
    assert measured_bits(operators) == kept


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
        plan = ComputePlan(operators, calls.BFLOAT16, 1, VOCAB, PAGE_TOKENS)
        slots = TinySlots(operators, model, calls.BFLOAT16, has_quants=True)
        decoder(plan, config, slots, with_hidden=True)  # type: ignore[arg-type]
        kinds |= {kind for kind, _, _ in plan._calls}
        forms |= {one.form for _, kept in plan.made_of for one in _leaves(kept) if isinstance(one, Matrix)}
    # Those of float32 have experts of another kind.
    assert kinds == set(range(calls.STATE_SPACE + 1)) - {calls.DENSE_EXPERTS}
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


def main() -> None:
    columns = []
    for variant in KEPT:
        library.choose(variant)
        operators = library.operators()
        assert operators is not None
        columns.append(measured_bits(operators))
    for name in columns[0]:
        print(f'    "{name}": "{" ".join(column[name] for column in columns)}",')


if __name__ == "__main__":
    main()
