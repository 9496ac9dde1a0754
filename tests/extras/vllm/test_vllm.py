"""What is refused at the start, in one line. Needs vLLM: `tools/vllm theirs` runs these in its environment."""

from __future__ import annotations

from types import SimpleNamespace as Fake
from typing import Any

import pytest

from diskprefix.extras.vllm.plans import StepPlan

vllm = pytest.importorskip("vllm")

compat: Any = pytest.importorskip("diskprefix.extras.vllm._vllm_compat")


def group(spec: Any) -> Any:
    return Fake(layer_names=["model.layers.0.mixer"], kv_cache_spec=spec)


def attention(kind: str, **more: Any) -> Any:
    from vllm.v1 import kv_cache_interface

    torch = pytest.importorskip("torch")
    spec = getattr(kv_cache_interface, kind)
    return spec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16, **more)


def test_this_version_is_supported_and_another_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    compat.check_version()
    monkeypatch.setattr(vllm, "__version__", "0.33.1")
    with pytest.raises(ImportError, match=r"^this diskprefix supports vLLM 0\.32, and 0\.33\.1 is installed$"):
        compat.check_version()


def test_a_model_with_recurrent_state_is_refused() -> None:
    from vllm.v1.kv_cache_interface import MambaSpec

    torch = pytest.importorskip("torch")
    state = MambaSpec(block_size=16, shapes=((2, 3),), dtypes=(torch.float32,))
    with pytest.raises(ValueError, match=r"cannot cache this model under vLLM: MambaSpec of model\.layers\.0\.mixer"):
        compat.engine_groups(Fake(kv_cache_groups=[group(state)]))


def test_layers_of_attention_are_groups_with_their_windows() -> None:
    specs = [attention("FullAttentionSpec"), attention("SlidingWindowSpec", sliding_window=64)]
    found = compat.engine_groups(Fake(kv_cache_groups=list(map(group, specs))))
    assert [(one.block_size, one.window) for one in found] == [(16, None), (16, 64)]


def test_context_parallelism_is_refused() -> None:
    parallel = Fake(decode_context_parallel_size=2, prefill_context_parallel_size=1)
    with pytest.raises(ValueError, match="context parallelism"):
        compat.check_parallel(Fake(parallel_config=parallel))


def test_requests_whose_tokens_do_not_say_all_are_not_cached() -> None:
    plain: dict[str, Any] = {"lora_request": None, "mm_features": [], "prompt_embeds": None, "pooling_params": None}
    plain |= {"skip_reading_prefix_cache": False}
    assert compat.why_not_cached(Fake(**plain)) is None
    for name, reason in (("lora_request", "lora"), ("mm_features", "media"), ("prompt_embeds", "embeddings")):
        assert compat.why_not_cached(Fake(**plain | {name: ["some"]})) == reason
    assert compat.why_not_cached(Fake(**plain | {"skip_reading_prefix_cache": True})) == "no_reading"


def test_a_warning_says_that_requests_would_fail(caplog: pytest.LogCaptureFixture) -> None:
    compat.warn_of_failures(Fake(kv_load_failure_policy="recompute"))
    assert not caplog.records
    compat.warn_of_failures(Fake(kv_load_failure_policy="fail"))
    assert 'kv_load_failure_policy is "fail"; set it to "recompute"' in caplog.text


@pytest.mark.parametrize("num_tokens", [0, 5])
def test_only_a_step_that_computes_nothing_waits_for_loads(num_tokens: int) -> None:
    module: Any = pytest.importorskip("diskprefix.extras.vllm.connector")
    waits: list[float] = []

    def take_results(patience_s: float) -> tuple[set[str], set[str], set[int]]:
        waits.append(patience_s)
        return set(), set(), set()

    worker = Fake(load=lambda _: None, take_results=take_results)
    connector = module.DiskPrefixConnector.__new__(module.DiskPrefixConnector)
    connector._scheduler, connector._worker, connector._requests = Fake(plan=lambda _: StepPlan()), worker, {}
    connector._keeps_part = True
    output = Fake(kv_connector_block_state=None, num_scheduled_tokens={}, total_num_scheduled_tokens=num_tokens)
    connector.bind_connector_metadata(connector.build_connector_meta(output))
    # The newer runner of models starts loads before there is metadata of attention.
    connector.start_load_kv(Fake(attn_metadata=None))
    connector.get_transfer_results(set())
    assert waits == [0 if num_tokens else module._IDLE_S]
