"""Weights are read once, into the place that they keep; how much memory a machine has left for them."""

from __future__ import annotations

import ctypes
import json
import resource
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from diskprefix.errors import ModelError
from diskprefix.runtime.files.checkpoint import StoredTensor, stored_tensors
from diskprefix.runtime.files.parameters import stored
from diskprefix.runtime.memory import LINE_BYTES, available_bytes, available_ram_bytes, large_pages, trim_heap
from tests import forked
from tests.runtime.load.test_loader import load
from tests.runtime.plan import tiny

MIB = 1 << 20


def note_growth(model: str, file: Path) -> None:
    """Writes how many bytes of memory more than before a process has, at most, while it loads the model."""
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    def memory(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024

    assert modeling_qwen3_moe
    before = memory("VmRSS")
    load(model)
    file.write_text(str(memory("VmHWM") - before))


def write_mixture(folder: Path, kind: str, each: int) -> int:
    """Writes a mixture of experts of this type, `each` bytes a number, all zeros, which take no room on the disk.
    Returns the bytes that it has in bfloat16."""
    experts, width, inner, vocabulary = 24, 1024, 512, 300
    config = Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        moe_intermediate_size=inner,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=experts,
        dtype="bfloat16",
        architectures=["Qwen3MoeForCausalLM"],
    )
    shapes = {"model.embed_tokens": (vocabulary, width), "model.norm": (width,), "lm_head": (vocabulary, width)}
    for layer in range(3):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{name}_layernorm": (width,) for name in ("input", "post_attention")}
        shapes |= {f"{at}.self_attn.{name}_norm": (64,) for name in "qk"}
        shapes |= {f"{at}.self_attn.{name}_proj": (128, width) for name in "kv"}
        shapes |= {f"{at}.self_attn.q_proj": (256, width), f"{at}.self_attn.o_proj": (width, 256)}
        shapes |= {f"{at}.mlp.gate": (experts, width)}
        for expert in range(experts):
            one = f"{at}.mlp.experts.{expert}"
            shapes |= {f"{one}.{name}_proj": (inner, width) for name in ("gate", "up")}
            shapes |= {f"{one}.down_proj": (width, inner)}
    header, size = {}, 0
    for name, shape in shapes.items():
        header[f"{name}.weight"] = {"dtype": kind, "shape": shape, "data_offsets": [size, size + each * prod(shape)]}
        size += each * prod(shape)
    text = json.dumps(header).encode()
    tiny.tokenizer().save_pretrained(folder)
    config.save_pretrained(folder)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)
    return size * 2 // each


@pytest.mark.parametrize(("kind", "each"), [("BF16", 2), ("F32", 4)])
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel does not tell")
def test_loading_takes_the_memory_of_the_weights_and_of_a_layer_of_experts(
    kind: str, each: int, tmp_path: Path
) -> None:
    size = write_mixture(tmp_path, kind, each)
    assert size > 200 * MIB
    assert forked.run(note_growth, str(tmp_path), tmp_path / "growth") == 0
    # The experts of a layer are read before they are put together. Libraries take 50 to 75 MiB; a layer has 74 more.
    assert size <= int((tmp_path / "growth").read_text()) <= size + size // 3 * (1 + each // 2) + 80 * MIB


def test_weights_lie_side_by_side_and_begin_with_a_line(tmp_path: Path) -> None:
    weights = load(tiny.write_folder(tmp_path / "m")).weights
    assert weights is not None
    places = sorted((array.ctypes.data, array.nbytes) for _, array in weights.named())
    assert all(address % LINE_BYTES == 0 for address, _ in places)
    assert places[-1][0] - places[0][0] < sum(num_bytes + LINE_BYTES for _, num_bytes in places)


def test_an_error_while_parameters_are_made_is_reported(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        vocab_size=300, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=1, num_experts=2, head_dim=16,
        num_experts_per_tok=1,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    name = "model.layers.0.mlp.experts.1.down_proj.weight"
    weights = load_file(file)
    save_file(weights | {name: weights[name][:-1].contiguous()}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=rf"the weights of .*down_proj do not fit together: {name} is"):
        load(tmp_path)


@pytest.mark.parametrize("problem", ["written", "cut"])
def test_a_file_that_changes_while_it_is_read_is_refused(
    problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.write_folder(tmp_path / "m")
    read, file = StoredTensor.read_into, folder / "model.safetensors"

    def changing(stored: StoredTensor, *args: Any) -> None:
        if problem == "written":
            file.write_bytes(file.read_bytes())
        else:
            file.write_bytes(file.read_bytes()[:-8])
        read(stored, *args)

    monkeypatch.setattr(StoredTensor, "read_into", changing)
    with pytest.raises(ModelError, match=r"was changed while it was read|ends within"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (6, 4)])
def test_a_stored_tensor_is_read_as_it_was_written(shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    tensors = {"before": torch.ones(3), "it": (torch.randn(shape) * 3).to(dtype), "after": torch.ones(5)}
    save_file(tensors, file)
    found = stored_tensors(tmp_path, [file])
    assert all(torch.equal(stored(one), tensors[one.name]) for one in found)


# The memory of the machine.


def write(folder: Path, files: Mapping[str, object]) -> Path:
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")
    return folder


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize(
    ("own", "groups", "free"),
    [
        # A machine without limits.
        ("0::/", {}, 8 * MIB),
        # The tightest group counts, and page cache is free.
        (
            "0::/a/b",
            {
                "a/b/memory.max": "max",
                "a/b/memory.current": MIB,
                "a/memory.max": 4 * MIB,
                "a/memory.current": 3 * MIB,
                "a/memory.stat": f"anon 1\ninactive_file {MIB}",
                "memory.max": 6 * MIB,
                "memory.current": 3 * MIB,
            },
            2 * MIB,
        ),
        # Version 1, in a container that sees its own group as the root. Without a limit it has nearly 2^63.
        (
            "4:cpu,cpuacct:/docker/1\n2:memory:/docker/1\n0::/",
            {
                "memory/memory.limit_in_bytes": 5 * MIB,
                "memory/memory.usage_in_bytes": 4 * MIB,
                "memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {2 * MIB}",
            },
            3 * MIB,
        ),
        (
            "2:memory:/",
            {"memory/memory.limit_in_bytes": 9223372036854771712, "memory/memory.usage_in_bytes": MIB},
            8 * MIB,
        ),
        # A group that is over its limit.
        ("0::/", {"memory.max": MIB, "memory.current": 2 * MIB}, 0),
    ],
)
def test_free_is_what_the_machine_and_the_control_groups_leave(
    own: str, groups: dict[str, object], free: int, tmp_path: Path
) -> None:
    proc = {"meminfo": "MemTotal: 9999 kB\nMemAvailable: 8192 kB", "self/cgroup": own}
    assert available_ram_bytes(write(tmp_path / "proc", proc), write(tmp_path / "cgroup", groups)) == free


def test_without_proc_the_machines_memory_is_taken(tmp_path: Path) -> None:
    assert available_ram_bytes(tmp_path / "none", tmp_path / "none") >= available_bytes("cpu") > 0


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library cannot")
def test_free_memory_of_the_heap_goes_back() -> None:
    pieces = [torch.ones(1000) for _ in range(20_000)]
    kept, before = pieces[-1], resident_bytes()
    pieces.clear()
    trim_heap()
    assert kept.sum() == 1000
    assert resident_bytes() < before - 50 * 1000**2


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the kernel does not tell")
def test_large_pages_are_asked_for() -> None:
    memory = large_pages(1 << 22)
    address, is_inside, flags = memory.ctypes.data, False, ""
    assert address % (1 << 21) == 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            first, end = (int(part, 16) for part in head.split("-"))
            is_inside = first <= address < end
        elif is_inside and head == "VmFlags:":
            flags = line
    assert " hg" in flags
