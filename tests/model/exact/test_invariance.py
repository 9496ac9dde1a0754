"""Exactness at every token is measured, and each thing that it needs can be taken away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from diskprefix.kv.arena import KVArena
from diskprefix.kv.group import GroupMemory
from diskprefix.kv.layers import TokenLayer
from diskprefix.kv.sizes import TILE
from diskprefix.kv.step import current_step
from diskprefix.model.exact import invariance, invariant, recurrent, rows
from diskprefix.model.exact import kernel_calls as calls
from diskprefix.model.exact.attention import attend, kernel
from diskprefix.model.exact.invariance import make_exact
from diskprefix.model.exact.kernel_calls import KernelCall
from diskprefix.model.exact.patterns import NAME, NotInvariant
from diskprefix.model.exact.rehearsal import made_up_tokens, rehearse
from diskprefix.model.load.fingerprint import Fingerprint
from diskprefix.native import attention_operator, library, scans
from tests.exactness.architectures import quantised_tiny_model, tiny_model

LENGTH = TILE + 60
pytestmark = pytest.mark.usefixtures("cache")


def verdict(name: str, dtype: torch.dtype = torch.float32) -> tuple[str, str]:
    model = tiny_model(name, dtype)
    layout, reason = make_exact(model)
    return layout.exact_at, reason


@pytest.mark.parametrize("name", ["mixtral", "qwen3_5", "lfm2"])
def test_it_is_exact_at_every_token_in_float32(name: str) -> None:
    """In bfloat16 see below; others are in the suite of exactness."""
    assert verdict(name) == ("token", "")


@pytest.mark.parametrize("name", ["gemma4", "olmo", "mixtral"])
def test_so_is_one_with_experts_or_that_drops_rows_or_turns_in_float32(name: str) -> None:
    model = tiny_model(name, torch.bfloat16)
    layout, reason = make_exact(model)
    assert (layout.exact_at, reason) == ("token", "")
    assert layout.packs


@pytest.mark.parametrize(
    ("name", "part", "reason"),
    [
        ("laguna", "_names", "softplus"),
        ("llama4", "_has_matrices", "bmm"),
        ("gemma3n", "_names", "matmul, std"),
    ],
)
def test_functions_and_experts_of_a_forward_are_computed_row_by_row(
    name: str, part: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert verdict(name, torch.bfloat16) == ("token", "")
    monkeypatch.setattr(invariant, part, lambda *_: False)
    exact_at, found = verdict(name, torch.bfloat16)
    assert (exact_at, reason in found) == ("grid", True)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("zaya", "recurrent layers of its own"),
        ("bloom", "positions are not an argument"),
        ("deepseek_v4", "its state is not cached"),
        ("gptj", "attention that computes with its mask"),
        ("xglm", "attention that computes with its mask"),
    ],
)
def test_what_is_exact_on_the_grid_only_says_why(name: str, reason: str) -> None:
    exact_at, found = verdict(name)
    assert exact_at == "grid"
    assert reason in found


def test_a_model_that_reads_behind_the_last_token_is_not_exact() -> None:
    def reads_behind(module: Any, query: Any, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out, weights = attend(module, query, key, *args, **kwargs)
        return out + 0.0 * key[..., -1:, :1].mean(), weights

    ALL_ATTENTION_FUNCTIONS.register(NAME, reads_behind)
    try:
        assert verdict("llama") == ("grid", "its attention is another one (error nan)")
    finally:
        ALL_ATTENTION_FUNCTIONS.register(NAME, attend)


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
    ((_, state),) = runs
    out, last = torch_chunk_gated_delta_rule(
        *(query, key, value, decay, beta),
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=epsilon > 0,
    )
    state.copy_(last)
    found: torch.Tensor = out
    return found


def test_a_scan_in_chunks_is_not_exact_at_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scans, "delta_rule", in_chunks_of_the_step)
    recurrent._compiled.cache_clear()
    monkeypatch.setattr(invariance, "_is_harmless", lambda *_: True)
    assert verdict("qwen3_next") == ("grid", "its state depends on the steps (0)")
    recurrent._compiled.cache_clear()


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_it_needs_the_compiled_operators(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_chosen", "torch")
    assert verdict(name) == ("grid", "it needs the compiled operators: torch (as it was chosen)")


def test_a_function_that_computes_something_else_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", lambda rows, *_, **__: 2 * rows)
    recurrent._replacements.cache_clear()
    model = tiny_model("lfm2", torch.float32)
    layout = rehearse(model)
    assert make_exact(model) == (layout, "recurrent layers of its own")
    recurrent._replacements.cache_clear()


def test_an_operator_of_which_nothing_is_known_means_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", torch.float32)
    norm = model.model.norm.forward
    monkeypatch.setattr(model.model.norm, "forward", lambda x: norm(x) + 0.0 * torch.special.i0(x))
    layout = rehearse(model)
    assert make_exact(model) == (layout, "operators of its own: special_i0")
    monkeypatch.setattr(invariance, "_is_harmless", lambda *_: True)
    assert make_exact(model)[1] == ""


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=made_up_tokens(model, 0, 50)).logits
    return logits


def test_a_model_on_the_grid_computes_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("mixtral", torch.float32)
    before, was = logits_of(model), Fingerprint.of(model, "")
    monkeypatch.setattr(invariance, "_rehearse", lambda *_: (_ for _ in ()).throw(NotInvariant("so")))
    layout, reason = make_exact(model)
    assert (layout.exact_at, reason) == ("grid", "so")
    assert Fingerprint.of(model, "") == was
    assert torch.equal(logits_of(model), before)


def test_the_fingerprint_names_our_attention_and_experts() -> None:
    model = tiny_model("mixtral", torch.float32)
    before = Fingerprint.of(model, "")
    make_exact(model)
    after = Fingerprint.of(model, "")
    products = invariant.products_of(model)
    assert products
    assert after == replace(
        before, attention=NAME, experts=NAME, products=products, attention_kernel=kernel(torch.device("cpu"))
    )
    assert "sdpa" in before.attention


def test_within_as_it_was_a_model_computes_as_before() -> None:
    model = tiny_model("llama", torch.float32)
    before = logits_of(model)
    layout, _ = make_exact(model)
    products = invariant.products_of(model)
    with invariant.as_it_was(model):
        assert torch.equal(logits_of(model), before)
        assert not invariant.products_of(model)
    assert invariant.products_of(model) == products
    assert run(model, layout, [LENGTH])


def test_the_measurement_tells_how_far_it_is_and_a_remembered_one_nothing() -> None:
    lines: list[str] = []
    for _ in range(2):
        model = tiny_model("llama", torch.float32)
        make_exact(model, form="told once", report=lines.append)
    label = lines[0]
    assert lines == [label, *(f"{label}: {share} %" for share in (25, 50, 75))]


def seeded(seed: int, **changes: Any) -> PreTrainedModel:
    """A model of one configuration, with weights of its own."""
    torch.manual_seed(seed)
    config = tiny_model("llama", torch.float32).config
    config.update(changes)
    found: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return found


def test_a_verdict_is_remembered_for_the_structure_whatever_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    first, same, deeper, replaced = seeded(0), seeded(1), seeded(2, num_hidden_layers=3), seeded(3)
    layout, _ = make_exact(first, form="this one")
    assert layout.exact_at == "token"
    monkeypatch.setattr(invariance, "_measured", lambda *_: "measured once more")
    assert make_exact(same, form="this one") == (layout, "")
    assert invariant.products_of(same) == invariant.products_of(first)
    assert run(same, layout, [5, 3])[0] == run(same, layout, [8])[0]
    for other in (deeper, replaced):
        if other is replaced:
            other.model.norm.forward = partial(type(other.model.norm).forward, other.model.norm)
        assert make_exact(other, form="this one")[1] == "measured once more"
    assert make_exact(seeded(4), form="another")[1] == "measured once more"
    assert make_exact(seeded(4))[1] == "measured once more"


def test_that_a_model_is_on_the_grid_is_remembered_for_its_own_weights_only(monkeypatch: pytest.MonkeyPatch) -> None:
    own = invariance._measured
    monkeypatch.setattr(invariance, "_measured", lambda *_: "so")
    layout, reason = make_exact(seeded(0), identity="these weights", form="this one")
    assert (layout, reason) == (rehearse(seeded(0)), "so")
    monkeypatch.setattr(invariance, "_measured", own)
    assert make_exact(seeded(0), identity="these weights", form="this one") == (layout, "so")
    assert make_exact(seeded(1), identity="other weights", form="this one")[1] == ""


def test_that_a_model_is_on_the_grid_is_believed_when_two_processes_have_measured_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def started(seed: int, finds: str | None = None) -> str:
        """What the next process says, in which a measurement finds that."""
        monkeypatch.setattr(invariance, "_STARTED", str(seed))
        with monkeypatch.context() as patch:
            if finds is not None:
                patch.setattr(invariance, "_measured", lambda *_: finds)
            return make_exact(seeded(0), identity="these weights", form="this one")[1]

    assert started(1, finds="an odd moment") == "an odd moment"
    assert started(2, finds="twice") == "twice"
    assert started(3, finds="not measured") == "twice"
    monkeypatch.setattr(invariance, "computed_by", lambda _: "other kernels")
    assert started(4, finds="an odd moment") == "an odd moment"
    assert started(5) == ""
    assert started(6, finds="not measured") == ""


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


def test_state_that_a_model_keeps_outside_its_cache_is_found_by_the_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the steps, all that it computes of an uninterrupted sequence is the same."""
    model = seeded(0)
    layer: Any = model.model.layers[0]
    layer.mlp = Forgetful(layer.mlp)
    monkeypatch.setattr(invariance, "_INTERRUPTED", invariance._NUM_TOKENS)
    assert make_exact(model)[0].exact_at == "token"
    monkeypatch.undo()
    assert make_exact(model)[0].exact_at == "grid"


@pytest.mark.parametrize(
    "damaged",
    ["", None, {"layout": {}}, {"layout": {}, "forms": []}, {"reason": 1}]
    + [{"forms": [[1, 2, "int", False, False, 3]]}]
    + [{"forms": [[64, 64, name, False, False]]} for name in ("nn", "no such type", 7)],
)
def test_a_remembered_verdict_that_cannot_be_is_measured_again(damaged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", torch.float32)
    if damaged and "layout" not in damaged:
        damaged |= {"layout": rehearse(model).record()}
    monkeypatch.setattr(invariance._verdicts, "get", lambda _: damaged)
    monkeypatch.setattr(invariance, "_measured", lambda *_: "measured once more")
    assert make_exact(model, identity="this one", form="this form")[1] == "measured once more"


def test_other_calls_of_a_product_give_the_model_another_root(monkeypatch: pytest.MonkeyPatch) -> None:
    def root(model: PreTrainedModel) -> str:
        make_exact(model, form="this one")
        return Fingerprint.of(model, "").identity(16, 1, "layout")

    # Products of matrices in bfloat16 may be compiled operators.
    first, second, third = (root(tiny_model("llama", torch.float32)) for _ in range(3))
    assert first == second == third
    safe = calls.safe_calls
    monkeypatch.setattr(calls, "safe_calls", lambda form: safe(form)[1:])
    assert root(tiny_model("llama", torch.float32)) != first


def run(model: PreTrainedModel, layout: Any, steps: Sequence[int]) -> tuple[bytes, torch.Tensor]:
    """The state of all tokens with the states at the end, and the last logits."""
    arena, token_ids = KVArena(layout, model.device), made_up_tokens(model, 7, sum(steps))
    with torch.inference_mode():
        arena.reserve(sum(steps))
        for part in torch.split(token_ids, list(steps), dim=1):
            logits = arena.forward(model, part)
    return bytes(arena.read_tokens(0, sum(steps))) + bytes(arena.read_states()), logits


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "gemma3", "gemma3n", "gpt_oss", "deepseek_v3", "phi3", "gpt_oss int8", "deepseek_v3 int4"),
        *("qwen3_5", "kimi_linear", "mamba2", "lfm2"),
    ],
)
def test_state_and_logits_have_the_same_bits_however_the_prompt_is_cut(name: str) -> None:
    name, _, weights = name.partition(" ")
    model = quantised_tiny_model(name, weights) if weights else tiny_model(name, torch.bfloat16)
    layout, reason = make_exact(model)
    assert not reason
    state, logits = run(model, layout, [256, 256, LENGTH - 512])

    @settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.integers(1, 300), min_size=1, max_size=12))
    def check(steps: list[int]) -> None:
        ends = sorted({min(sum(steps[: i + 1]), LENGTH) for i in range(len(steps))} | {LENGTH})
        found = run(model, layout, [end - begin for begin, end in zip([0, *ends], ends, strict=False)])
        assert found[0] == state
        assert torch.equal(found[1], logits)

    check()


def restored_after_another(model: PreTrainedModel, cold: KVArena, num_tokens: int) -> torch.Tensor:
    """Logits of a restored prompt, of which a window's tokens were loaded into memory that was not finite."""
    arena = KVArena(cold.layout, model.device)
    arena.reserve(cold.capacity)
    for number, (memory, computed) in enumerate(zip(arena.memory, cold.memory, strict=True)):
        memory.tensor.fill_(float("nan"))
        loaded = slice(memory.group.first_needed(num_tokens), num_tokens)
        arena.prepare_restore(number, loaded.start, num_tokens)
        memory.tensor[:, :, :, loaded] = computed.tensor[:, :, :, loaded]
    arena.truncate(num_tokens)
    with torch.inference_mode():
        return arena.forward(model, made_up_tokens(model, 8, 3))


def test_what_lies_before_a_window_never_shows_in_a_restored_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gemma3", torch.bfloat16)
    layout, _ = make_exact(model)
    assert any(group.window for group in layout.groups)
    cold = KVArena(layout, model.device)
    with torch.inference_mode():
        cold.forward(model, made_up_tokens(model, 7, 600))
        expected = cold.forward(model, made_up_tokens(model, 8, 3))
    assert torch.equal(restored_after_another(model, cold, 600), expected)
    monkeypatch.setattr(GroupMemory, "prepare_restore", lambda *_: None)
    assert not restored_after_another(model, cold, 600).isfinite().all()


def test_a_model_gets_no_more_of_the_memory_than_the_tiles_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some models compute with all that they get: it must not cost more where there is more memory."""
    model = tiny_model("llama", torch.float32)
    memory = KVArena(make_exact(model)[0], model.device)
    memory.reserve(8 * TILE)
    put, sizes = TokenLayer.put, set[int]()

    def noted(self: TokenLayer, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = put(self, *args)
        sizes.update((keys.shape[2], values.shape[2]))
        return keys, values

    monkeypatch.setattr(TokenLayer, "put", noted)
    with torch.inference_mode():
        memory.forward(model, made_up_tokens(model, 7, 30))
    assert sizes == {TILE}


def unsafe_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are computed with as many rows as there are."""
    monkeypatch.setattr(rows, "_plans", rows._Plans())
    monkeypatch.setattr(rows, "calls_of", lambda _, count: (KernelCall(count),) if count else ())


def experts_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of transformers: an expert's products have as many rows as it was chosen by."""
    monkeypatch.setattr(invariant, "_KERNELS", ("_attn_implementation_internal",))


def functions_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that do not fill a vector are computed by another code."""
    monkeypatch.setattr(invariant, "in_whole_vectors", lambda function, *args: function(*args))


@pytest.mark.parametrize(
    ("name", "remove"),
    [
        ("llama", unsafe_counts),
        ("mixtral", unsafe_counts),
        ("mixtral", experts_as_they_are),
        ("deepseek_v3", functions_as_they_are),
    ],
)
@pytest.mark.parametrize("is_large", [False, True], ids=["steps of small models", "steps of large models"])
def test_without_a_protection_it_is_not_exact(
    name: str, remove: Any, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_large:
        monkeypatch.setattr(invariance, "_LARGE_BYTES", 0)
    assert verdict(name)[0] == "token"
    remove(monkeypatch)
    assert verdict(name)[0] == "grid"


def test_single_tokens_of_a_large_model_lie_on_both_sides_of_the_end_of_a_tile() -> None:
    steps, whole = invariance._other_steps(invariance._LARGE_BYTES)
    ends = set(accumulate(steps))
    assert {TILE - 1, TILE, TILE + 1, *accumulate(invariance._STEPS)} <= ends
    assert max(ends) == sum(whole) == invariance._NUM_TOKENS


def test_attention_that_sees_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = attention_operator.attention
    monkeypatch.setattr(
        attention_operator, "attention", lambda *args, **options: attend(*args, **options | {"window": 3})
    )
    exact_at, reason = verdict("llama")
    assert exact_at == "grid"
    assert "another one" in reason
