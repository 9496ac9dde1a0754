"""A root changes with all that changes a model's numbers, and with nothing else. Digests of files are remembered."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from diskprefix import PrefixCacheSession, model_identity
from diskprefix.daemon.settings import Settings
from diskprefix.kernel_settings import cpu_kind
from diskprefix.model_identity import remembered_digest, weights_digest
from diskprefix.runtime.load import code_digest, fingerprint
from diskprefix.runtime.load.fingerprint import fingerprint_of_modules
from diskprefix.tokens import file_digest, root_hash
from tests.daemon.engine.driving import done, load, run, tokens
from tests.runtime.load.test_plan_fingerprint import literal
from tests.runtime.plan.tiny import llama as tiny
from tests.runtime.plan.tiny import write_folder

LAYOUT = '{"groups":[{"heads":2,"head_dim":8,"dtype":"float32"}]}'
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


def root_of(model: Any, mode: str = "strict", digest: str = "d") -> bytes:
    return root_hash(fingerprint_of_modules(model, digest, mode).identity(256, 1, LAYOUT))


def with_config(name: str, value: Any) -> Any:
    model = tiny()
    setattr(model.config, name, value)
    return model


def with_adapter(*, weight: float, rank: int = 4, active: str = "tuned") -> Any:
    """A model as peft leaves it: configurations by name, and parameters that carry the adapter's name."""
    model = tiny()
    described = {"r": rank, "lora_dropout": 0.1, "base_model_name_or_path": "/somewhere"}
    model.peft_config = {"tuned": SimpleNamespace(to_dict=lambda: described)}
    model.active_adapters = lambda: [active]
    projection = model.model.layers[0].self_attn.q_proj
    projection.lora_A = torch.nn.ModuleDict({"tuned": torch.nn.Linear(32, rank, bias=False)})
    torch.nn.init.constant_(projection.lora_A["tuned"].weight, weight)
    return model


@pytest.mark.cases(23)
@pytest.mark.parametrize("mode", ["strict", "portable"])
@pytest.mark.parametrize(
    "changed",
    [
        lambda: tiny(rope_parameters={"rope_type": "default", "rope_theta": 500000.0}),
        lambda: tiny(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}),
        lambda: tiny(rms_norm_eps=1e-5),
        lambda: tiny(hidden_act="gelu"),
        lambda: tiny(num_key_value_heads=4),
        lambda: tiny(num_hidden_layers=1),
        lambda: tiny(head_dim=16),
        lambda: tiny(vocab_size=101),
        lambda: tiny(attention_bias=True),
        lambda: tiny(tie_word_embeddings=True),
        lambda: with_config("a_field_of_a_later_version", 3),
        lambda: with_config("pad_token_id", 3),
        lambda: tiny().to(torch.bfloat16),
        lambda: tiny().to(torch.float16),
        lambda: tiny(attn_implementation="eager"),
        lambda: with_config("_experts_implementation", "grouped_mm"),
        lambda: with_config("quantization_config", {"quant_method": "gptq", "bits": 4}),
        lambda: with_adapter(weight=0.5),
    ],
)
def test_each_ingredient_of_the_model_changes_the_root(changed: Callable[[], Any], mode: str) -> None:
    assert root_of(changed(), mode) != root_of(tiny(), mode)


@pytest.mark.parametrize("mode", ["strict", "portable"])
@pytest.mark.parametrize(
    "changed",
    [
        lambda: tiny(max_position_embeddings=4096),
        lambda: tiny(attention_dropout=0.1),
        lambda: tiny(initializer_range=0.5),
        lambda: tiny(use_cache=False),
        lambda: tiny(bos_token_id=7, eos_token_id=[8, 9]),
        lambda: tiny(num_labels=5),
        lambda: with_config("_name_or_path", "/another/folder"),
        lambda: with_config("_model_name_or_path", "Another Name"),
        lambda: with_config("transformers_version", "1.2.3"),
        lambda: with_config("architectures", ["LlamaForCausalLM"]),
        lambda: with_config("output_hidden_states", True),
        lambda: tiny(rope_parameters={"rope_type": "default", "rope_theta": 10000}),
    ],
)
def test_options_that_change_no_number_keep_the_root(changed: Callable[[], Any], mode: str) -> None:
    assert root_of(changed(), mode) == root_of(tiny(), mode)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"rope_parameters": DYNAMIC}, {"rope_parameters": DYNAMIC, "max_position_embeddings": 256}),
        ({"rope_parameters": YARN}, {"rope_parameters": YARN, "max_position_embeddings": 256}),
        ({"rope_parameters": YARN}, {"rope_parameters": YARN | {"original_max_position_embeddings": 32}}),
    ],
)
def test_the_maximum_context_counts_where_rope_computes_with_it(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert root_of(tiny(**deepcopy(one))) != root_of(tiny(**deepcopy(other)))
    by_kind = [{"rope_parameters": {"full_attention": DYNAMIC}, "max_position_embeddings": n} for n in (128, 256)]
    assert model_identity.architecture(by_kind[0]) != model_identity.architecture(by_kind[1])


@pytest.mark.parametrize("other", [{"weight": 0.25}, {"weight": 0.5, "rank": 8}, {"weight": 0.5, "active": "none"}])
def test_adapters_differ_by_content_settings_and_activation(other: dict[str, Any]) -> None:
    assert root_of(with_adapter(weight=0.5)) == root_of(with_adapter(weight=0.5))
    assert root_of(with_adapter(weight=0.5)) != root_of(with_adapter(**other))


@pytest.mark.parametrize(
    "name", ["ONEDNN_DEFAULT_FPMATH_MODE", "NVIDIA_TF32_OVERRIDE", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR"]
)
def test_variables_that_change_numbers_behind_torchs_back_change_the_root(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(name, raising=False)
    before = root_of(tiny())
    monkeypatch.setenv(name, "")
    assert root_of(tiny()) == before
    monkeypatch.setenv(name, "BF16")
    assert root_of(tiny()) != before
    assert fingerprint_of_modules(tiny(), "d").as_dict()["environment"][name] == "BF16"


@pytest.mark.parametrize("name", ["device", "cpu", "torch_version", "gguf_version"])
def test_device_and_libraries_count_in_strict_mode_alone(name: str) -> None:
    for mode, counts in (("strict", True), ("portable", False)):
        print_ = fingerprint_of_modules(tiny(), "d", mode)
        other = replace(print_, named={**print_.named, name: "another"})
        assert (other.identity(256, 1, LAYOUT) != print_.identity(256, 1, LAYOUT)) is counts


@pytest.mark.cases(4)
@pytest.mark.parametrize("mode", ["strict", "portable"])
@pytest.mark.parametrize(
    ("file", "computes"),
    [
        ("runtime/grid/grid_cache.py", True),
        ("runtime/files/gguf/sources.py", True),
        ("runtime/memory.py", True),
        ("native/matrix.py", True),
        ("prefixstore/kv/page_table.py", True),
        ("runtime/fetch/hub.py", False),
        ("runtime/files/gguf/file_tokenizer.py", False),
    ],
)
def test_a_change_of_computing_code_changes_the_root_and_outdates_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, computes: bool, mode: str
) -> None:
    before, key = root_of(tiny(), mode), code_digest.computed_by(tiny())
    shutil.copytree(code_digest._PACKAGE, tmp_path / "package", ignore=shutil.ignore_patterns("*.so", "*.pyc"))
    monkeypatch.setattr(code_digest, "_PACKAGE", tmp_path / "package")
    monkeypatch.setattr(code_digest, "code_digest", code_digest.code_digest.__wrapped__)
    monkeypatch.setattr(fingerprint, "code_digest", code_digest.code_digest)
    assert root_of(tiny(), mode) == before
    with (tmp_path / "package" / file).open("a") as code:
        code.write("# another norm\n")
    assert (root_of(tiny(), mode) != before) is computes
    assert (code_digest.computed_by(tiny()) != key) is computes


def test_no_module_that_computes_imports_one_that_is_left_out_of_the_digest() -> None:
    """But those that read options or look for files, the processor of pictures, whose tokenizer transformers gets, and
    the strings of a file, which are searched by their hashes."""
    left_out, importing = code_digest._COMPUTE_NOTHING, set()
    paths = [path for pattern in code_digest._CODE for path in code_digest._PACKAGE.glob(pattern)]
    assert left_out <= {path.stem for path in paths}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).rpartition(".")[2] in left_out - {path.stem}:
                importing.add(path.stem)
    assert importing - left_out == {
        "choose_runtime",
        "loader",
        "gguf_file",
        "gguf_strings",
        "projector",
        "file_processor",
    }


def test_weights_and_modes_never_share_a_root() -> None:
    assert len({root_of(tiny(), mode, digest) for mode in ("strict", "portable") for digest in "ab"}) == 4


roots = st.tuples(st.integers(16, 65536), st.integers(1, 9), st.text(max_size=8), st.text(max_size=8))


@given(roots, roots)
def test_block_size_layout_and_salt_change_the_root(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert (literal().identity(*one) == literal().identity(*other)) is (one == other)


def test_the_fingerprint_can_be_shown_as_json() -> None:
    shown = json.loads(
        json.dumps(fingerprint_of_modules(with_config("quantization_config", {"bits": 4}), "d").as_dict())
    )
    assert shown["architecture"]["rope_parameters"]["rope_type"] == "default"
    assert shown["quantisation"] == {"bits": 4}
    assert shown["adapters"] is None
    assert shown["attention"] == "sdpa"
    assert shown["mode"] == "strict"


def write_settled(file: Path, content: bytes, mtime_s: int = 1_700_000_000) -> Path:
    """Write `content` with a modification time in the past: young files are not remembered."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    os.utime(file, (mtime_s, mtime_s))
    return file


def forbid_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> str:
        raise AssertionError(f"{path} was read again")

    monkeypatch.setattr(model_identity, "file_digest", refuse)


@pytest.mark.usefixtures("cache")
def test_the_digest_depends_on_content_alone(tmp_path: Path) -> None:
    one = [write_settled(tmp_path / "a" / f"{i}.safetensors", bytes([i])) for i in range(3)]
    two = [write_settled(tmp_path / "b" / f"{i}.safetensors", bytes([i]), 1_600_000_000) for i in range(3)]
    other = [write_settled(tmp_path / "c" / f"{i}.safetensors", bytes([i + 1])) for i in range(3)]
    assert weights_digest(one) == weights_digest(two[::-1])
    assert weights_digest(one) != weights_digest(other)
    assert weights_digest(one) != weights_digest(one[:2])
    assert len(weights_digest(one)) == 32


@pytest.mark.usefixtures("cache")
def test_a_digest_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_settled(tmp_path / "model.safetensors", b"weights")
    link = tmp_path / "link"
    link.symlink_to(file)
    digest = remembered_digest(file)
    forbid_reading(monkeypatch)
    assert remembered_digest(file) == remembered_digest(link) == digest


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("is_replaced", [False, True], ids=["written", "replaced by one of the same time"])
def test_a_changed_file_of_the_same_size_is_read_again(is_replaced: bool, tmp_path: Path) -> None:
    file = write_settled(tmp_path / "model.safetensors", b"one")
    before = remembered_digest(file)
    if is_replaced:
        write_settled(tmp_path / "new", b"two").replace(file)
    else:
        write_settled(file, b"two", 1_700_000_001)
    assert remembered_digest(file) != before


MKLDNN: Any = torch.backends.mkldnn
CUDA: Any = torch.backends.cuda


def attribute(where: Any, name: str, value: Any) -> tuple[Callable[[Any], object], Any, Any]:
    return lambda one: setattr(where, name, one), value, getattr(where, name)


@pytest.mark.parametrize(
    ("change", "value", "default"),
    [
        (CUDA.enable_flash_sdp, False, True),
        (CUDA.enable_math_sdp, False, True),
        (torch.use_deterministic_algorithms, True, False),
        (torch.set_float32_matmul_precision, "medium", "highest"),
        (torch.set_flush_denormal, True, False),
        (torch.set_default_dtype, torch.float64, torch.float32),
        (partial(torch.set_autocast_enabled, "cpu"), True, False),
        attribute(MKLDNN, "enabled", False),
        attribute(MKLDNN, "deterministic", True),
        attribute(torch.backends.cudnn, "deterministic", True),
        attribute(CUDA.matmul, "allow_fp16_accumulation", True),
        # The newer names, after which the older ones cannot be read.
        attribute(MKLDNN.matmul, "fp32_precision", "bf16"),
        attribute(CUDA.matmul, "fp32_precision", "tf32"),
    ],
)
def test_a_switch_of_torch_that_is_not_at_its_default_counts(
    change: Callable[[Any], object], value: Any, default: Any
) -> None:
    model = tiny()
    plain = root_of(model)
    change(value)
    try:
        changed = root_of(model)
    finally:
        change(default)
    assert (changed != plain, root_of(model)) == (True, plain)


def test_a_compiled_model_has_another_identity() -> None:
    model = tiny()
    plain = root_of(model)
    # What `model.compile()` leaves; it takes seconds to import.
    model._compiled_call_impl = model._call_impl
    assert root_of(model) != plain


@pytest.mark.slow
def test_another_instruction_set_of_torch_is_another_kind_of_cpu() -> None:
    code = "from diskprefix.kernel_settings import cpu_kind; print(cpu_kind())"
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "default"}
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert answer.stdout.strip() != cpu_kind()


def test_packages_whose_kernels_transformers_takes_count_unless_machines_share_a_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = root_of(tiny())
    portable = root_of(tiny(), "portable")
    monkeypatch.setattr(fingerprint, "kernel_packages", lambda: {"causal_conv1d": "1.6"})
    assert root_of(tiny()) != plain
    assert root_of(tiny(), "portable") == portable


def test_a_kernel_package_is_found_where_it_can_be_imported(tmp_path: Path) -> None:
    (tmp_path / "mamba_ssm").mkdir()
    code = "import json; from diskprefix.kernel_settings import kernel_packages as f; print(json.dumps(f()))"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert json.loads(found.stdout)["mamba_ssm"] == "unknown"


def test_a_file_that_may_still_be_written_is_not_remembered(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"one")
    remembered_digest(file)
    assert not (cache.parent / "digests.json").exists()


@pytest.mark.parametrize(
    "memory",
    [
        b'{"format": 2, "records": {"FILE": 3}}',
        b'{"format": 2, "records": {"FILE": {"stamp": [1, 2, 3], "digest": "0"}}}',
    ],
)
def test_a_broken_memory_is_ignored_and_rewritten(
    memory: bytes, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_settled(tmp_path / "model.safetensors", b"weights")
    expected = file_digest(file)
    cache.parent.mkdir(parents=True)
    (cache.parent / "digests.json").write_bytes(memory.replace(b"FILE", str(file).encode()))
    assert remembered_digest(file) == expected
    forbid_reading(monkeypatch)
    assert remembered_digest(file) == expected
    assert [path.name for path in cache.parent.iterdir()] == ["digests.json"]


# The number of compute threads belongs to the identity, unless a plan computes: torch's kernels cut their sums by it.

BLOCK = 16


@pytest.fixture
def threads_put_back() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def restored_after(folder: Path, kv: Path, before: int, after: int, **changes: Any) -> int:
    for num_threads in (before, after):
        torch.set_num_threads(num_threads)
        engine = load(folder, kv, block_size=BLOCK, **changes)
        restored = done(run(engine, tokens(100))).usage.cached_tokens
        assert engine.close()
    return restored


@pytest.mark.slow
@pytest.mark.usefixtures("cache", "threads_put_back")
def test_daemons_do_not_share_a_store_over_numbers_of_threads(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", dtype=torch.float16, max_position_embeddings=512)
    assert restored_after(folder, tmp_path / "a", 1, 3) == 0
    assert restored_after(folder, tmp_path / "b", 3, 3) > 0
    assert restored_after(folder, tmp_path / "c", 1, 3, fingerprint="portable") > 0
    by_plan = write_folder(tmp_path / "by plan", dtype=torch.bfloat16, max_position_embeddings=512)
    assert restored_after(by_plan, tmp_path / "d", 1, 3) == 100


@pytest.mark.usefixtures("cache", "threads_put_back")
def test_a_session_notices_that_the_number_of_threads_was_changed(tmp_path: Path) -> None:
    settings = Settings(kv_cache_dir=tmp_path, block_size=BLOCK, kv_cache_min_tokens=BLOCK, kv_cache_gate="off")
    restored = []
    with PrefixCacheSession(tiny(), scope="full", settings=settings) as session:
        for num_threads in (1, 2, 2, 1):
            torch.set_num_threads(num_threads)
            restored.append(session.prefill(tokens(100).tolist())[1])
    assert restored == [0, 0, 96, 96]
