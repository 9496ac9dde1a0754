"""Files of SmallThinker, of which transformers has no class, give what its equations give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from diskprefix.daemon.settings import Settings
from diskprefix.errors import ModelError
from diskprefix.native.library import operators
from diskprefix.prefixstore.kv.pages import PagePool
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.runtime.contract import Rows
from diskprefix.runtime.files.file_matrix import MatrixPacking
from diskprefix.runtime.files.gguf.gguf import GgufModel
from diskprefix.runtime.load.loader import load_model
from diskprefix.runtime.load.self_check import check
from diskprefix.runtime.plan.families.slot_names import SlotNames
from diskprefix.runtime.plan.planned import PlanRuntime, plan_layout
from diskprefix.runtime.plan.quants.forms import compiled
from tests.runtime.files.gguf.test_gguf_models import TOKENS, require_equal
from tests.runtime.plan import plans, small_thinker
from tests.runtime.plan.gguf_files import written
from tests.runtime.plan.tensor_weights import require_numbers

pytestmark = pytest.mark.usefixtures("cache")
OPTIONS = [{"has_windows": windows, "is_sigmoid": sigmoid} for windows in (True, False) for sigmoid in (True, False)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_file_gives_the_logits_of_the_equations(options: dict[str, bool], tmp_path: Path) -> None:
    expected = small_thinker.logits(torch.from_numpy(TOKENS), **options)
    read = GgufModel.read(small_thinker.write(tmp_path / "tiny.gguf", **options), print)
    require_equal(plans.logits_of(read.decoder_weights("float32"), read.config, TOKENS), expected)
    quantised = small_thinker.write(tmp_path / "q8.gguf", gguf.GGMLQuantizationType.Q8_0, **options)
    read = GgufModel.read(quantised, print)
    plain, packed = read.decoder_weights("bfloat16"), read.decoder_weights("bfloat16", MatrixPacking(compiled()))
    plans.logits_of(packed, read.config)
    assert packed._quants
    require_numbers(packed._quants, plain.tensor, SlotNames.of(read.config).experts)


def test_the_last_layer_computes_the_rows_alone_that_get_logits(tmp_path: Path) -> None:
    options = OPTIONS[0]
    read = GgufModel.read(small_thinker.write(tmp_path / "tiny.gguf", **options), print)
    weights = read.decoder_weights("float32")
    layout = plan_layout(weights, read.config)
    runtime = PlanRuntime(weights, read.config, layout, 256)
    runtime.prepare()
    sequence = KVSequence(PagePool(layout, block_size=256))
    last_rows = runtime.run([Rows(sequence, TOKENS, 3)]).logits[0]
    expected = small_thinker.logits(torch.from_numpy(TOKENS), **options)
    require_equal(torch.from_numpy(np.asarray(last_rows)), expected[-3:])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_file_is_exact_at_every_token(dtype: str, tmp_path: Path) -> None:
    if operators() is None:
        pytest.skip("no compiled operators")
    file = small_thinker.write(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q8_0, **OPTIONS[0])
    served = load_model(Settings(model=str(file), dtype=dtype), lambda _: None)
    assert served.weights is not None
    assert not served.reason
    check(served.weights, served.config, plan_layout(served.weights, served.config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_gating_func": None}, "the file lacks smallthinker.expert_gating_func"),
        ({"expert_gating_func": 3}, "experts that are weighted so are not served: expert_gating_func 3"),
        ({"expert_weights_scale": 2.5}, "smallthinker.expert_weights_scale is 2.5, and nothing here reads it"),
        ({"attention.sliding_window_pattern": 4}, "which is not an array"),
        ({"attention.sliding_window_pattern": [True] * 5}, "a window in all layers but the first of each four"),
    ],
)
def test_what_no_model_computes_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    given = small_thinker.values(**OPTIONS[0]) | changes
    file = written(tmp_path / "tiny.gguf", "smallthinker", small_thinker.Sizes, given, small_thinker.tensors())
    with pytest.raises(ModelError, match=message):
        GgufModel.read(file, print)


def test_its_modules_are_refused_in_one_line(tmp_path: Path) -> None:
    file = small_thinker.write(tmp_path / "tiny.gguf", **OPTIONS[0])
    served = load_model(Settings(model=str(file)), lambda _: None)
    with pytest.raises(ModelError, match=r"transformers .* has no class of smallthinker") as raised:
        served.read_modules()
    assert "\n" not in str(raised.value)


def test_its_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    named = {"model_type": "smallthinker", "architectures": ["SmallThinkerForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(named))
    save_file(small_thinker.tensors(), tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="smallthinker") as raised:
        load_model(Settings(model=str(tmp_path)), lambda _: None)
    assert "\n" not in str(raised.value)
