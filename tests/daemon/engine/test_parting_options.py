"""The options that part the cache are those that are marked, and a difference of two identities is told by them.

Each runtime is loaded with each marked option alone, and with all others at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from msgspec import Struct

from diskprefix.daemon.cli import cli
from diskprefix.daemon.cli.options import build_settings, policy_values
from diskprefix.daemon.settings import SETTINGS, Settings
from diskprefix.prefixstore.cache.other_settings import differing_options
from diskprefix.runtime.choose_runtime import ServableModel, load_servable
from diskprefix.setting import flag_of
from diskprefix.tokens import TokenIds
from diskprefix.values import CacheReport, is_miss
from tests.daemon.cli.test_options import by_a_policy, values_of
from tests.daemon.engine.driving import done, load, run, tokens, write_model
from tests.runtime.llama.test_load_llama import Loading
from tests.runtime.load.test_draft_layer import write_folder as write_with_draft_layer
from tests.runtime.plan.test_scaled_positions import ORIGINAL
from tests.runtime.plan.tiny import write_gguf

OF_OTHER_MODELS = ("model", "draft_model")
PARTING = {name for name, setting in SETTINGS.items() if setting.parts_cache}


class Case(Struct, frozen=True):
    """A model for a runtime, and the options that change its identity, each with a value that does. `same` are values
    of parting options that change nothing for it."""

    model: Callable[[Path], Path]
    runtime: str
    parts: dict[str, Any]
    same: dict[str, Any] = {}


def of_quants(folder: Path) -> Path:
    return write_gguf(folder / "tiny.gguf", quantised="Q4_0")


def with_draft_layer(folder: Path) -> Path:
    return write_with_draft_layer(folder / "draft", "mimo2")


def of_two_lengths(folder: Path) -> Path:
    return write_model(folder / "phi", "phi3+long")


def of_float32(folder: Path) -> Path:
    return write_model(folder / "llama", "llama", torch.float32)


EVERYWHERE = {"block_size": 32, "fingerprint": "portable"}
OF_PLANS = EVERYWHERE | {"dtype": "float32", "kv_type": "q8", "rows": "15", "runtime": "grid", "kernels": "torch"}
CASES = {
    "quants": Case(
        of_quants,
        "plan",
        OF_PLANS | {"weights": "native"},
        {"context": 64, "speculative": "ngram", "device": "cpu", "runtime": "plan", "dtype": "bfloat16"},
    ),
    "draft layer": Case(with_draft_layer, "plan", {"speculative": "off"}, {"speculative": "mtp", "context": 64}),
    "two lengths": Case(of_two_lengths, "plan", {"context": ORIGINAL}, {"context": ORIGINAL + 8, "weights": "native"}),
    "grid": Case(
        of_float32,
        "grid",
        EVERYWHERE | {"dtype": "bfloat16", "runtime": "plan"},
        {"rows": "15", "context": 64, "speculative": "off", "weights": "native", "kernels": "avx2", "dtype": "float32"},
    ),
    "llama": Case(
        of_quants,
        "llama on cpu",
        EVERYWHERE | {"kv_type": "q8", "device": "CUDA0"},
        {"context": 64, "speculative": "off"},
    ),
    "llama on a device": Case(of_quants, "llama on CUDA0", {"gpu_layers": 1, "device": "CUDA1"}, {"context": 64}),
}


class Opening:
    """Loads the model of a case, llama.cpp's library being a script."""

    def __init__(self, case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        runtime, _, device = case.runtime.partition(" on ")
        if runtime == "llama":
            (folder / "library").mkdir()
            loading = Loading(folder / "library", monkeypatch)
            loading.api.gpus = {"CUDA0": (1, 1 << 40), "CUDA1": (1, 1 << 40)}
        self.plain: dict[str, Any] = {
            "model": str(case.model(folder)),
            "runtime": "auto" if runtime == "plan" else runtime,
            "device": device or "auto",
            "block_size": 64,
            "kv_cache_dir": folder / "kv",
        }

    def __call__(self, **changes: Any) -> tuple[str, dict[str, Any]]:
        """Returns the identity of the model, and what its record says of the options."""
        settings = Settings(**self.plain | changes)
        measurement: ServableModel = load_servable(settings, lambda _line: None)
        measurement.loaded.finish()
        return measurement.identity(settings), measurement.options(settings)


@pytest.fixture
def opening(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opening:
    return Opening(CASES[request.param], tmp_path, monkeypatch)


@pytest.mark.parametrize(("opening", "case"), CASES.items(), indirect=["opening"], ids=CASES.keys())
def test_each_option_that_parts_the_cache_is_told_alone(opening: Opening, case: Case) -> None:
    identity, options = opening()
    assert options.keys() == PARTING
    for name, value in case.parts.items():
        other_identity, other_options = opening(**{name: value})
        assert other_identity != identity, name
        given = options[name].given
        assert differing_options(options, other_options) == {flag_of(name): given}, name
    same = [(name, opening(**{name: value})) for name, value in case.same.items()]
    assert [name for name, (other, _) in same if other != identity] == []
    assert [name for name, (_, other) in same if differing_options(options, other)] == []


@pytest.mark.parametrize(("opening", "case"), CASES.items(), indirect=["opening"], ids=CASES.keys())
def test_no_other_option_changes_the_identity(opening: Opening, case: Case, tmp_path: Path) -> None:
    del case
    model = opening.plain["model"]
    others = {name: value for name, value in values_of(tmp_path, Path(model)).items() if name not in PARTING}
    _, policy = by_a_policy(others, tmp_path)[0]
    given = build_settings(policy_values(policy))
    changes = {name: getattr(given, name) for name in others if name not in OF_OTHER_MODELS}
    assert opening(**changes) == opening()


@pytest.mark.parametrize("architecture", ["llama", "lfm2"])
@pytest.mark.parametrize(
    ("was", "now"), [({}, {"kv_type": "q8"}), ({}, {"runtime": "grid"}), ({"runtime": "grid"}, {})], ids=str
)
def test_what_other_options_have_stored_is_promised_as_far_as_they_would_restore_it(
    was: dict[str, Any], now: dict[str, Any], architecture: str, tmp_path: Path
) -> None:
    """State at checkpoints is restored up to one, and state on the grid up to the end of a block."""
    model, folder, stored = write_model(tmp_path / "model", architecture), tmp_path / "kv", tokens(404)
    prompts = [np.append(stored[:count], tokens(20, seed=count)) for count in (404, 396, 60)]

    def reports(options: dict[str, Any], prompts: Sequence[TokenIds], **request: Any) -> list[CacheReport]:
        engine = load(model, folder, **options)
        found = [done(run(engine, prompt, **request)).cache for prompt in prompts]
        assert engine.close()
        return found

    reports(was, [stored])
    promised, restored = reports(now, prompts, save=False), reports(was, prompts, save=False)
    assert [report.restored for report in promised] == [0] * 3
    hits = [not is_miss(len(prompt), report.restored) for prompt, report in zip(prompts, restored, strict=True)]
    assert hits[0]
    assert [report.miss_reason == "other_settings" for report in promised] == hits
    assert all(report.stored_with for report in promised if report.miss_reason == "other_settings")


def test_each_marked_option_is_shown_to_part_the_cache_of_some_model() -> None:
    assert {name for case in CASES.values() for name in case.parts} == PARTING


def test_the_help_marks_the_options_that_part_the_cache() -> None:
    shown = " ".join(CliRunner().invoke(cli, ["serve", "--help-all"]).output.split())
    marked = {name for name in SETTINGS if f"{SETTINGS[name].help} (*)" in shown}
    assert marked == PARTING
    assert "prefixes saved with one value are not found with another" in shown
