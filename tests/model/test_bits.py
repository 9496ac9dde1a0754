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
from diskprefix.model.quants.quant_form import FILE_FORMS
from diskprefix.model.slots import Slots
from diskprefix.model.tiny_models import MODELS, NAMES, VOCAB, TinyWeights
from diskprefix.native import calls, library
from diskprefix.native.build import LIBRARY
from diskprefix.native.library import Operators
from diskprefix.native.matrix import Matrix
from tests.model.test_plan_fingerprint import leaves_of
from tests.native.variants import SAME_BITS, of_this_cpu, print_kept

KEPT = ("avx512_bf16", "avx512", "avx2", "baseline") if platform.machine() == "x86_64" else ()
GOLDEN = {
    "dense in float32": "508d47faf602515f 508d47faf602515f 2d171a3d5e4749ad c9390bb2de2ca63b",
    "dense in bfloat16": "de46144c926e2ee9 a25c87c0053ab42f a25c87c0053ab42f a25c87c0053ab42f",
    "dense in quants": "2e9357ac19f377ba afdf97e135821d8b afdf97e135821d8b 60aec806cd46244d",
    "dense in q8": "f17e951a80bce163 0189ef6e8b8652be 0189ef6e8b8652be 216734797e65dd3c",
    "dense in few bits in float32": "c5c4d56008523fcf c5c4d56008523fcf 02b9d4d705472124 8467342ebd294fbb",
    "dense in few bits in bfloat16": "c0ec4ba9a169d936 ac9d2052beddd74b ac9d2052beddd74b 9ae14204bced29e0",
    "dense in few bits in quants": "fd0755405c317425 1c220d45f350ae66 1c220d45f350ae66 e4a7c657848eb789",
    "dense in few bits in q8": "d670bd627b0739d8 181d1d5d3b873327 55ebe5467b7b6c92 181d1d5d3b873327",
    "plain in float32": "2c6d7ed8ea01425f 2c6d7ed8ea01425f f9b92f4c622e1492 2b410b3084623f9c",
    "plain in bfloat16": "62a623680ae40415 ec5a0de07c7d7c05 ec5a0de07c7d7c05 b8d11125534e7333",
    "plain in quants": "12098001e02dd6a1 5534cc35bbf56966 c12b862ed9e71e54 0f8a725ad767da8f",
    "plain in q8": "0e12ba2562a2b363 00e5e7659dad0a64 00e5e7659dad0a64 00e5e7659dad0a64",
    "mixture in float32": "f4424de4b5bf08db f4424de4b5bf08db 884e5f317b6abba3 a37847195468975e",
    "mixture in bfloat16": "f5e0f68adb1a082e 014469c23286ec1d 014469c23286ec1d 014469c23286ec1d",
    "mixture in quants": "48ed7e11050a1c00 5249d015f8cd66fd 5249d015f8cd66fd 7f397d06703dd72f",
    "mixture in q8": "c83212052252b398 cf0935d99ed09507 cf0935d99ed09507 cf0935d99ed09507",
    "mixture with sinks in float32": "a33e1cdd1548f20a a33e1cdd1548f20a f3a2c175d3e04769 5c1abe3a54488423",
    "mixture with sinks in bfloat16": "e2f4c9b23d897528 b074e10d6b391329 b074e10d6b391329 e36fc4ab479d6058",
    "mixture with sinks in quants": "03153c32bfeef348 475c3539c810736d 475c3539c810736d aa67159e02527882",
    "mixture with sinks in q8": "4c5ffee25867a426 b77a71a10c8bd5cc fd1dd5c55adf9647 fd1dd5c55adf9647",
    "latent in float32": "fce5686ad6083946 fce5686ad6083946 0a9e0779ae7913f6 d64d2c197c7cfcd6",
    "latent in bfloat16": "c0a961cc0f6ff57b d8f156cda80653ee d8f156cda80653ee d8f156cda80653ee",
    "latent in quants": "422adf3f38997314 f0e42cbf6b9d891d f0e42cbf6b9d891d e1bceee14582d2c6",
    "latent in q8": "bb398a376dabe906 e65655375cd72d3b e65655375cd72d3b e65655375cd72d3b",
    "recurrent in float32": "3eeda5b21a57b850 3eeda5b21a57b850 df67d2cd5851a9a3 10f165e10345649b",
    "recurrent in bfloat16": "e28442547bc5db76 491410535ceb6f1a 884e177d49bf2540 1f7e5f725876e13f",
    "recurrent in quants": "6b7da9ae0e0766ac 2e602626125a1bb8 540d789def013c3d 41b49353ba39d7b7",
    "recurrent in q8": "bc366ad6e1527cb2 c76bdc9aa1526e2e c4d3f3dc6df1bbf0 414e46576cbdc2ae",
    "recurrent by numbers in float32": "3bcf758ff481ceaa 3bcf758ff481ceaa 4210df1b170a9118 663187a092be134c",
    "recurrent by numbers in bfloat16": "cefed04a1f16ed44 3ac5dccfe2c81e26 c87d2aeef0b81969 f3bbe0a0903990ae",
    "recurrent by numbers in quants": "4541f5136441dd29 dbb6bc8e6f38941e 0875d387509894b2 8db96171a15fa7b7",
    "recurrent by numbers in q8": "cefed04a1f16ed44 3ac5dccfe2c81e26 c87d2aeef0b81969 f3bbe0a0903990ae",
    "with draft layer in float32": "50c3f5d5b8f6e651 50c3f5d5b8f6e651 4ff9e5405186bcf8 dfed8bb569662618",
    "with draft layer in bfloat16": "ec054a83c5e7f526 21b0ba40cc73d9d3 21b0ba40cc73d9d3 ff78e3f942f3c7fe",
    "with draft layer in quants": "b45f5d053aeaab23 0652dc0fd2196004 0652dc0fd2196004 5b6169e42eed48a2",
    "with draft layer in q8": "a7e91de57b2c895b dc95cbcb627f6b4a dc95cbcb627f6b4a dc95cbcb627f6b4a",
    "late gemma in float32": "c0ce9356b1976b02 c0ce9356b1976b02 8a70f129d3041f94 36dd1f6b7d86da69",
    "late gemma in bfloat16": "c87a918d0945ec98 e07cec8e07010147 e07cec8e07010147 c946dee3a17b8f4c",
    "late gemma in quants": "9661cc4a7f35ac29 838ad2bed90365c5 838ad2bed90365c5 bd5a7e5d73414450",
    "late gemma in q8": "84795304eab33528 8fe3c28e6671541f 61fcbf1687cfb6ac 8fe3c28e6671541f",
}
"""Digests, for each of the variants in `KEPT`. Those in `SAME_BITS` have the bits of another one."""


@pytest.fixture
def operators(request: pytest.FixtureRequest) -> Operators:
    library.choose(getattr(request, "param", "auto"))
    found = library.operators()
    assert found is not None
    return found


@pytest.mark.parametrize("operators", of_this_cpu((*KEPT, *SAME_BITS)), indirect=True)
def test_each_family_computes_its_golden_bits(operators: Operators) -> None:
    column = KEPT.index(SAME_BITS.get(operators.variant, operators.variant))
    kept = {name: of_variants.split()[column] for name, of_variants in GOLDEN.items()}
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
        plan = ComputePlan(calls.BFLOAT16, 1, VOCAB)
        weights = TinyWeights(operators, model, calls.BFLOAT16, has_quants=True)
        decoder(plan, config, Slots(weights, config.norms, NAMES), with_hidden=True)
        kinds |= {operation.kind for operation in plan.operations}
        forms |= {one.form for made in plan.operations for one in leaves_of(made.kept) if isinstance(one, Matrix)}
    # Those of float32 have experts of another kind.
    assert kinds == set(range(calls.HEAD_PRODUCT + 1)) - {calls.DENSE_EXPERTS}
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
    print_kept(measured_bits, KEPT)
