"""What the connector asks of vLLM, and what it says if that is not there. Needs vLLM:
`tests/bridges/real-engines theirs` runs these in its environment."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace as Fake
from typing import Any

import pytest

from diskprefix.bridges.shared.step_orders import StepOrders
from diskprefix.bridges.vllm.engine_pages import UnsupportedPages

vllm = pytest.importorskip("vllm")

compat: Any = pytest.importorskip("diskprefix.bridges.vllm._vllm_compat")


def group(spec: Any) -> Any:
    return Fake(layer_names=["model.layers.0.mixer"], kv_cache_spec=spec)


def attention(kind: str, **more: Any) -> Any:
    from vllm.v1 import kv_cache_interface

    torch = pytest.importorskip("torch")
    spec = getattr(kv_cache_interface, kind)
    return spec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16, **more)


def test_this_version_has_all_that_is_used_and_one_that_lacks_something_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert compat.check_version() is None
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    assert compat.check_version().startswith("vLLM 0.99.1 was not tried with this diskprefix; tried were 0.32, ")
    monkeypatch.setitem(compat.USED, "vllm.v1.request:Request", ("request_id", "nothing_of_the_kind"))
    lacks = r"^diskprefix cannot be a connector of vLLM 0\.99\.1: it has no Request\.nothing_of_the_kind$"
    with pytest.raises(ImportError, match=lacks):
        compat.check_version()


def config(**parallel: Any) -> Any:
    sizes = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, "rank": 0, "world_size": 1}
    return Fake(parallel_config=Fake(**sizes | parallel))


def recurrent() -> Any:
    from vllm.v1.kv_cache_interface import MambaSpec

    torch = pytest.importorskip("torch")
    return MambaSpec(block_size=16, shapes=((2, 3),), dtypes=(torch.float32,))


def test_layers_without_keys_and_values_of_each_token_cannot_be_stored() -> None:
    with pytest.raises(UnsupportedPages, match=r"model\.layers\.0\.mixer \(MambaSpec\) has no keys and values of each"):
        compat.engine_groups(config(), Fake(kv_cache_groups=[group(recurrent())]))


@pytest.mark.parametrize("why", ["recurrent", "context parallelism", "pages"])
def test_a_model_that_cannot_be_stored_is_served_without_the_cache_and_that_is_said_once(
    why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch = pytest.importorskip("torch")
    module: Any = pytest.importorskip("diskprefix.bridges.vllm.connector")
    extra = {"kv_cache_dir": str(tmp_path / "kv"), "kv_cache_budget": "64MiB"}
    transfer = Fake(kv_connector_extra_config=extra, kv_load_failure_policy="recompute")
    engine = config(decode_context_parallel_size=2 if why == "context parallelism" else 1)
    engine.kv_transfer_config = transfer
    spec = recurrent() if why == "recurrent" else attention("FullAttentionSpec")
    cache = Fake(kv_cache_groups=[group(spec)], num_blocks=4)
    roles = module.compat.KVConnectorRole
    worker = module.DiskPrefixConnector(engine, roles.WORKER, cache)
    scheduler = module.DiskPrefixConnector(engine, roles.SCHEDULER, cache)
    worker.register_kv_caches({"model.layers.0.mixer": torch.zeros(4, 7)})
    assert worker.get_handshake_metadata() is None
    scheduler.set_xfer_handshake_metadata_pp_aware({})
    request = Fake(request_id="a")
    scheduler.on_new_request(request)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    worker.bind_connector_metadata(scheduler.build_connector_meta(Fake(total_num_scheduled_tokens=3)))
    worker.start_load_kv(None)
    worker.wait_for_save()
    assert not worker.get_transfer_results({"a"}).finished_recving
    assert scheduler.request_finished(request, []) == (False, None)
    assert scheduler.reset_cache()
    for one in (worker, scheduler):
        assert one.get_kv_connector_stats() is None
        one.shutdown()
    assert caplog.text.count("this model is served without the cache: ") == 1


def test_layers_of_attention_are_groups_with_their_windows() -> None:
    specs = [attention("FullAttentionSpec"), attention("SlidingWindowSpec", sliding_window=64)]
    found = compat.engine_groups(config(), Fake(kv_cache_groups=list(map(group, specs))))
    assert [(one.block_size, one.window) for one in found] == [(16, None), (16, 64)]


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
    module: Any = pytest.importorskip("diskprefix.bridges.vllm.connector")
    waits: list[float] = []
    waits_for_fetch: list[float] = []

    def take_results(patience_s: float) -> tuple[set[str], set[str], set[int]]:
        waits.append(patience_s)
        return set(), set(), set()

    worker = Fake(load=lambda _: None, take_results=take_results)
    connector = module.DiskPrefixConnector.__new__(module.DiskPrefixConnector)
    scheduler = Fake(plan=lambda _: StepOrders(), wait_for_fetch=waits_for_fetch.append)
    connector._scheduler, connector._worker, connector._requests = scheduler, worker, {}
    connector._keeps_part = True
    output = Fake(kv_connector_block_state=None, num_scheduled_tokens={}, total_num_scheduled_tokens=num_tokens)
    connector.bind_connector_metadata(connector.build_connector_meta(output))
    # The newer runner of models starts loads before there is metadata of attention.
    connector.start_load_kv(Fake(attn_metadata=None))
    connector.get_transfer_results(set())
    assert waits == [0 if num_tokens else module._IDLE_S]
    assert waits_for_fetch == ([] if num_tokens else [module._IDLE_S])
