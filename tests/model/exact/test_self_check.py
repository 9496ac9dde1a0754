"""Models are exact at every token, the check says so, and each thing that they need can be taken away."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from diskprefix.kv.page_table import LayerRows
from diskprefix.kv.pages import PagePool
from diskprefix.kv.sequence import KVSequence
from diskprefix.kv.step import current_step
from diskprefix.model.exact import invariant, self_check, verified
from diskprefix.model.exact.attention import attend, kernel
from diskprefix.model.exact.patterns import NAME, NotInvariant
from diskprefix.model.exact.runner import forward
from diskprefix.model.exact.self_check import make_exact
from diskprefix.model.exact.state_layout import made_up_tokens
from diskprefix.model.load.fingerprint import Fingerprint
from diskprefix.native import attention_operator, build, library, scans
from diskprefix.tokens import floor_to_grid
from tests.exactness.architectures import ARCHITECTURES, tiny_model

pytestmark = pytest.mark.usefixtures("cache")


def verdict(name: str, dtype: torch.dtype = torch.float32) -> tuple[str, str]:
    model = tiny_model(name, dtype)
    layout, reason = make_exact(model)
    return layout.exact_at, reason


def test_only_what_the_matrix_covers_is_on_the_list() -> None:
    covered = {each.build().get_text_config(decoder=True).model_type for each in ARCHITECTURES.values()}
    assert covered >= verified._VERIFIED


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_missing_operators_are_a_warning_with_the_remedy_unless_they_were_left_out(
    kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "none.so")
    library._loaded.cache_clear()
    library.choose(kernels)
    assert verdict("llama")[0] == "grid"
    library._loaded.cache_clear()
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [("apt install g++" in line, "pip install" in line) for line in warnings] == [(True, True)] * (
        kernels == "auto"
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("zaya", "no such architecture was verified at every token"),
        ("deepseek_v4", "its state is not cached"),
    ],
)
def test_what_is_exact_on_the_grid_only_says_why(name: str, reason: str) -> None:
    assert verdict(name) == ("grid", reason)


def test_a_class_that_is_not_of_transformers_is_not_taken_for_a_verified_one() -> None:
    model = tiny_model("llama", torch.float32)
    model.__class__ = type("LlamaForCausalLM", (type(model),), {"__module__": "modeling_own"})
    assert make_exact(model)[1] == "no such architecture was verified at every token"


@pytest.mark.usefixtures("by_modules")
def test_a_model_that_reads_behind_the_last_token_is_not_exact() -> None:
    def reads_behind(module: Any, query: Any, key: list[LayerRows], *args: Any, **kwargs: Any) -> Any:
        out, weights = attend(module, query, key, *args, **kwargs)
        return out + 0.0 * key[0].part(0)[:, -1:, :1].mean(), weights

    ALL_ATTENTION_FUNCTIONS.register(NAME, reads_behind)
    try:
        assert verdict("llama") == ("grid", "its attention is another one (error nan)")
    finally:
        ALL_ATTENTION_FUNCTIONS.register(NAME, attend)


@pytest.mark.parametrize("is_other", [False, True])
def test_the_first_layers_of_each_kind_are_checked(is_other: bool) -> None:
    model, calls = tiny_model("llama", torch.float32), []
    last: Any = model.model.layers[-1].mlp
    last.register_forward_hook(lambda *_: calls.append(1))
    if is_other:
        last.is_other = True
    assert make_exact(model)[1] == ""
    assert (len(calls) > 1) is is_other, "all layers are run once, for the layout"
    assert len(model.model.layers) == model.config.num_hidden_layers


def in_chunks_of_the_step(
    _: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    runs: scans.Runs,
    epsilon: float,
) -> torch.Tensor:
    """As transformers computes a prompt."""
    ((_, before, state),) = runs
    out, last = torch_chunk_gated_delta_rule(
        *(query, key, value, decay, beta),
        initial_state=before,
        output_final_state=True,
        use_qk_l2norm_in_kernel=epsilon > 0,
    )
    state.copy_(last)
    found: torch.Tensor = out
    return found


@pytest.mark.usefixtures("by_modules")
def test_a_scan_in_chunks_is_not_exact_at_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scans, "delta_rule", in_chunks_of_the_step)
    assert verdict("qwen3_next") == ("grid", "its state depends on the steps")


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_it_needs_the_compiled_operators(name: str) -> None:
    library.choose("torch")
    assert verdict(name) == ("grid", "it needs the compiled operators: torch (as it was chosen)")


def test_a_function_that_computes_something_else_means_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", lambda rows, *_, **__: 2 * rows)
    assert verdict("lfm2")[0] == "grid"


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=made_up_tokens(model, 0, 50)).logits
    return logits


def refused(_: PreTrainedModel) -> Any:
    raise NotInvariant("so")


def test_a_model_on_the_grid_computes_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("mixtral", torch.float32)
    before, was = logits_of(model), Fingerprint.of(model, "")
    monkeypatch.setattr(self_check, "_checked", refused)
    layout, reason = make_exact(model)
    assert (layout.exact_at, reason) == ("grid", "so")
    assert Fingerprint.of(model, "") == was
    assert torch.equal(logits_of(model), before)


def test_the_fingerprint_names_our_attention_and_experts() -> None:
    model = tiny_model("mixtral", torch.float32)
    before = Fingerprint.of(model, "")
    make_exact(model)
    after = Fingerprint.of(model, "")
    assert after == replace(before, attention=NAME, experts=NAME, attention_kernel=kernel(torch.device("cpu")))
    assert "sdpa" in before.attention


def test_within_as_it_was_a_model_computes_as_before() -> None:
    model = tiny_model("llama", torch.float32)
    before = logits_of(model)
    make_exact(model)
    with invariant.as_it_was(model):
        assert torch.equal(logits_of(model), before)
        assert not invariant.is_installed(model)
    assert invariant.is_installed(model)


def test_a_check_that_was_passed_is_remembered_for_these_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    found = make_exact(tiny_model("llama", torch.float32), "these weights")
    monkeypatch.setattr(self_check, "_checked", refused)
    same, other = (tiny_model("llama", torch.float32) for _ in range(2))
    assert make_exact(same, "these weights") == found
    assert invariant.is_installed(same)
    assert make_exact(other, "other weights")[1] == "so"
    assert make_exact(other)[1] == "so"


def test_a_wrong_moment_does_not_decide_for_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(self_check, "_checked", refused)
            assert make_exact(tiny_model("llama", torch.float32), "these weights")[1] == "so"
    assert make_exact(tiny_model("llama", torch.float32), "these weights")[1] == ""


@pytest.mark.parametrize("damaged", ["", 7, [], {}, {"layers": 1}, {"layers": [], "groups": []}])
def test_what_is_remembered_and_cannot_be_is_checked_again(damaged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check._passed, "get", lambda _: damaged)
    monkeypatch.setattr(self_check, "_checked", refused)
    assert make_exact(tiny_model("llama", torch.float32), "these weights")[1] == "so"


class Forgetful(nn.Module):
    """A layer's part that adds what it saw before, and keeps that beside the cache until a sequence begins."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own, self.seen = own, torch.zeros(())

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.own(rows)
        step = current_step()
        if step is None or step.runs[0].start == 0:
            self.seen = rows[:, :1]
        return found + 0.001 * self.seen


@pytest.mark.usefixtures("by_modules")
def test_state_that_a_model_keeps_outside_its_cache_is_found_by_the_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the steps, all that it computes of an uninterrupted sequence is the same."""
    model = tiny_model("llama", torch.float32)
    layer: Any = model.model.layers[0]
    layer.mlp, own = Forgetful(layer.mlp), self_check._run
    monkeypatch.setattr(self_check, "_run", lambda *args, **options: own(*args, **options | {"restored_at": 0}))
    assert make_exact(model)[0].exact_at == "token"
    monkeypatch.undo()
    assert make_exact(model)[0].exact_at == "grid"


def restored(model: PreTrainedModel, cold: KVSequence, num_tokens: int, *, num_missing: int = 0) -> torch.Tensor:
    """Logits of a restored prompt, behind which memory is not finite. `num_missing`: pages too few of windows."""
    sequence, size = KVSequence(cold.pool), cold.pool.block_size
    for number, (table, computed) in enumerate(zip(sequence.tables, cold.tables, strict=True)):
        first = floor_to_grid(table.group.first_needed(num_tokens), size)
        sequence.prepare_restore(number, first + num_missing * size if first else 0, num_tokens)
        for at, (page, source) in enumerate(zip(table.pages, computed.pages, strict=False)):
            if page is not None and source is not None:
                page.tensor.fill_(torch.nan)
                page.tensor[:, :, : num_tokens - at * size] = source.tensor[:, :, : num_tokens - at * size]
    sequence.truncate(num_tokens)
    with torch.inference_mode():
        return forward(model, sequence, made_up_tokens(model, 8, 3))[-1]


@pytest.mark.parametrize("block_size", [16, 48, 256])
def test_a_restored_run_needs_the_pages_of_its_windows_only(block_size: int) -> None:
    model = tiny_model("gemma3", torch.bfloat16)
    layout, _ = make_exact(model)
    assert any(group.window for group in layout.groups)
    cold = KVSequence(PagePool(layout, model.device, block_size=block_size))
    with torch.inference_mode():
        forward(model, cold, made_up_tokens(model, 7, 600))[-1]
        expected = forward(model, cold, made_up_tokens(model, 8, 3))[-1]
    assert torch.equal(restored(model, cold, 600), expected)
    with pytest.raises(NotInvariant, match="does not keep"):
        restored(model, cold, 600, num_missing=1)


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_a_model_that_gets_its_memory_side_by_side_has_the_same_bits(name: str) -> None:
    model = tiny_model(name, torch.bfloat16)
    layout, _ = make_exact(model)
    found = []
    for packs in (True, False):
        sequence = KVSequence(PagePool(replace(layout, packs=packs), model.device, block_size=256))
        with torch.inference_mode():
            for part in torch.split(made_up_tokens(model, 7, 610), [300, 300, 9, 1], dim=1):
                logits = forward(model, sequence, part)[-1]
        found.append((sequence.content(sequence.complete_from, sequence.complete_from + 50), logits.tolist()))
    assert found[0] == found[1]


@pytest.mark.usefixtures("by_modules")
def test_attention_that_sees_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = attention_operator.attention
    monkeypatch.setattr(
        attention_operator, "attention", lambda *args, **options: attend(*args, **options | {"window": 3})
    )
    exact_at, reason = verdict("llama")
    assert exact_at == "grid"
    assert "another one" in reason
