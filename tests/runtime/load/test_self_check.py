"""Models with a plan are exact at every token, and the check finds what is not."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import PreTrainedModel

from diskprefix.daemon.settings import Settings
from diskprefix.native import build, library
from diskprefix.native.library import operators
from diskprefix.runtime.choose_runtime import servable
from diskprefix.runtime.files.file_matrix import MatrixPacking
from diskprefix.runtime.load import loader, packed_weights, self_check
from diskprefix.runtime.plan.plan_runner import PlanRunner
from diskprefix.runtime.plan.planned import NotExact, PlanRuntime, config_of, first_layers
from tests.exactness.architectures import tiny_model
from tests.modules import layout_of
from tests.runtime.plan import tiny

pytestmark = pytest.mark.usefixtures("cache")


def verdict(name: str, dtype: torch.dtype = torch.float32) -> tuple[str, str]:
    layout, reason = layout_of(tiny_model(name, dtype))
    return layout.exact_at, reason


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_missing_operators_are_a_warning_with_the_remedy_unless_they_were_left_out(
    kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "none.so")
    library._loaded.cache_clear()
    library.choose(kernels)
    model = tiny_model("llama", torch.float32)
    loaded: Any = SimpleNamespace(runtime=None, model=model, weights_digest="", reason="", device="cpu")
    assert servable(loaded, Settings()).layout.exact_at == "grid"
    library._loaded.cache_clear()
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [("apt install g++" in line, "pip install" in line) for line in warnings] == [(True, True)] * (
        kernels == "auto"
    )


@pytest.mark.parametrize("is_chosen", [False, True])
def test_operators_of_another_cpu_are_a_warning_with_the_remedy_unless_they_were_chosen(
    is_chosen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = library.variants()[0] if is_chosen else "auto"
    monkeypatch.setattr(library, "VARIANTS", ("newest", *library.VARIANTS))
    monkeypatch.setattr(library, "_lacks", lambda name: name == "newest")
    library.choose(kernels)
    settings = Settings(model=str(tiny.write_folder(tmp_path / "m")), kernels=kernels)
    assert servable(loader.begin_load(settings, lambda _: None), settings).layout.exact_at == "token"
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert ["newest was not compiled" in line and "pip install" in line for line in warnings] == [True] * (
        not is_chosen
    )


@pytest.mark.parametrize(
    ("name", "reason"), [("zaya", "no family has zaya"), ("deepseek_v4", "its state is not cached")]
)
def test_a_model_exact_on_the_grid_only_says_why(name: str, reason: str) -> None:
    assert verdict(name) == ("grid", reason)


def test_a_type_of_numbers_without_a_plan_means_the_grid() -> None:
    assert verdict("llama", torch.float16) == ("grid", "no plan computes in float16")


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_it_needs_the_compiled_operators(name: str) -> None:
    library.choose("torch")
    assert verdict(name) == ("grid", "it needs the compiled operators: torch (as it was chosen)")


@pytest.mark.parametrize(("name", "num_layers"), [("llama", 1), ("gemma3", 2), ("lfm2", 2)])
def test_the_first_layers_of_each_kind_are_checked(name: str, num_layers: int) -> None:
    model = tiny_model(name, torch.float32)
    config = config_of(model.config, "float32", layout_of(model)[0], 16)
    assert len(first_layers(config).layers) == num_layers < len(config.layers)


Run = Callable[..., None]


def counting_positions_from_the_step(own: Run, runs: Any, ids: np.ndarray, positions: np.ndarray, *others: Any) -> None:
    own(runs, ids, positions - positions[:, :1], *others)


def seeing_one_more(own: Run, runs: Any, *others: Any) -> None:
    own([replace(run, start=run.start + 1) for run in runs], *others)


def seeing_another_sequence(own: Run, runs: Any, *others: Any) -> None:
    own([replace(run, tables=runs[0].tables, states=runs[0].states) for run in runs], *others)


@pytest.mark.parametrize(
    ("name", "wrong", "reason"),
    [
        ("llama", counting_positions_from_the_step, "its state depends on the steps"),
        ("llama", seeing_one_more, "its logits are not finite"),
        ("llama", seeing_another_sequence, "it depends on other sequences, or on guesses that were taken back"),
    ],
)
def test_the_check_detects_wrong_results(name: str, wrong: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = PlanRunner.run
    monkeypatch.setattr(PlanRunner, "run", lambda runner, *args: wrong(lambda *a: own(runner, *a), *args))
    assert verdict(name) == ("grid", reason)


def test_the_check_detects_draft_tokens_that_are_not_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlanRunner, "replay", lambda *_: None)
    assert verdict("lfm2") == ("grid", "it depends on other sequences, or on guesses that were taken back")


def test_state_that_is_kept_outside_of_memory_is_found_by_the_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the steps, all that is computed of an uninterrupted sequence is the same."""
    own, seen = PlanRunner.run, dict[int, int]()

    def run(runner: PlanRunner, runs: Any, ids: np.ndarray, *others: Any) -> None:
        if runs[0].start == 0:
            seen[0] = int(ids[0])
        own(runner, runs, np.where(ids == 7, seen[0], ids), *others)

    model, tokens = tiny_model("llama", torch.float32), self_check._made_up
    monkeypatch.setattr(PlanRunner, "run", run)
    monkeypatch.setattr(self_check, "_made_up", lambda *args: np.append(tokens(*args)[:-1], 7))
    assert layout_of(model)[1] == "its state depends on the steps"


def refused(*_: Any) -> Any:
    raise NotExact("so")


def test_a_check_that_was_passed_is_remembered_for_these_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    found = layout_of(tiny_model("llama", torch.float32), "these weights")
    monkeypatch.setattr(self_check, "_check", refused)
    same, other = (tiny_model("llama", torch.float32) for _ in range(2))
    assert layout_of(same, "these weights") == found
    assert layout_of(other, "other weights")[1] == "so"
    assert layout_of(other)[1] == "so"


def test_a_wrong_moment_does_not_decide_for_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(self_check, "_check", refused)
            assert layout_of(tiny_model("llama", torch.float32), "these weights")[1] == "so"
    assert layout_of(tiny_model("llama", torch.float32), "these weights")[1] == ""


def test_a_model_that_fails_is_read_as_modules_when_the_memory_of_its_plan_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans, read = list[weakref.ref[Any]](), loader._ModelSource.modules

    def failing(runtime: PlanRuntime) -> None:
        plans.extend(map(weakref.ref, (runtime.weights, runtime.runner)))
        raise NotExact("so")

    def modules(source: Any, **options: Any) -> PreTrainedModel:
        assert [plan() for plan in plans] == [None, None]
        return read(source, **options)

    monkeypatch.setattr(self_check, "_check", failing)
    monkeypatch.setattr(loader._ModelSource, "modules", modules)
    settings = Settings(model=str(tiny.write_folder(tmp_path / "m")))
    found = servable(loader.begin_load(settings, lambda _: None), settings)
    assert (found.layout.exact_at, found.reason) == ("grid", "so")


def test_a_model_that_fails_keeps_no_packed_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if operators() is None:
        pytest.skip("no compiled operators")
    matrices, take = list[weakref.ref[Any]](), MatrixPacking.take

    def note(packing: MatrixPacking, matrix: Any) -> Any:
        packed = take(packing, matrix)
        matrices.append(weakref.ref(packed))
        return packed

    monkeypatch.setattr(packed_weights, "LEAST_BYTES", 0)
    monkeypatch.setattr(MatrixPacking, "take", note)
    monkeypatch.setattr(self_check, "_check", refused)
    model = tiny.write_gguf(tmp_path / "tiny.gguf", quantised="Q4_1")
    settings = Settings(model=str(model), packed_weights=str(tmp_path / "weights"))
    found = servable(loader.begin_load(settings, lambda _: None), settings)
    assert found.reason == "so"
    assert matrices
    assert not [packed for packed in matrices if packed() is not None]
    assert [*found.loaded.keep_weights()] == [None]
    assert not (tmp_path / "weights").exists()


@pytest.mark.parametrize("damaged", ["", 7, [], {}, {"layers": 1}, {"layers": [], "groups": []}])
def test_a_damaged_verdict_is_checked_again(damaged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check._passed, "get", lambda _: damaged)
    monkeypatch.setattr(self_check, "_check", refused)
    assert layout_of(tiny_model("llama", torch.float32), "these weights")[1] == "so"
