"""Folders of safetensors in bfloat16, of the shape of known models, filled as models are before their training."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diskprefix.errors import ModelError
from diskprefix.model.load.gguf import require_disk
from diskprefix.progress import Report

_CONTEXT = 32_768
_HEADER_BYTES = 8 << 20
_TOKENIZER_FILES = ("token*", "special_tokens_map.json", "vocab.json", "merges.txt", "chat_template.jinja")
_STACKED = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)")


@dataclass(frozen=True, kw_only=True)
class FolderShape:
    """`settings` are those of transformers' configuration for `model_type`. Those named in `widths` are divided by a
    scale. `most_bytes` bounds the weights: the model has as many of the layers as fit."""

    model_type: str
    settings: dict[str, Any]
    widths: tuple[str, ...]
    most_bytes: int = 9 * 10**9

    def config(self, vocabulary: int, scale: int, layers: int | None) -> Any:
        from transformers import CONFIG_MAPPING

        settings = dict(self.settings)
        for name in self.widths if scale > 1 else ():
            settings[name] = max(32, settings[name] // scale // 32 * 32)
        if layers is not None:
            settings["num_hidden_layers"] = layers
        return CONFIG_MAPPING[self.model_type](
            **settings, vocab_size=vocabulary, max_position_embeddings=_CONTEXT, dtype="bfloat16"
        )


def write_folder(
    shape: FolderShape,
    tokenizer: Path,
    folder: Path,
    report: Report,
    scale: int = 1,
    layers: int | None = None,
    seed: int = 0,
) -> Path:
    """Writes a model of this shape with the tokenizer of the folder `tokenizer`, module by module. Returns its folder.

    Raises `ModelError` if the disk has no room for it.
    """
    import torch
    from transformers import AutoTokenizer

    from diskprefix.model.quants.tensor_writer import TensorWriter

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    vocabulary = -(-len(loaded) // 64) * 64
    model = _fitting(shape, vocabulary, scale, layers)
    total = sum(2 * parameter.numel() for parameter in model.parameters())
    require_disk(folder.parent, total)
    work = folder.with_suffix(".partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    for pattern in _TOKENIZER_FILES:
        for file in tokenizer.glob(pattern):
            shutil.copy(file, work)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(work)
    torch.manual_seed(seed)
    writer, written = TensorWriter(work / "model.safetensors", _HEADER_BYTES), 0
    for name, tensor in _drawn(model):
        writer.add(name, tensor)
        written += tensor.nbytes
        report(f"{folder.name}: {written / total:.0%} of {total / 1e9:.2f} GB, {model.config.num_hidden_layers} layers")
    writer.finish({"format": "pt"})
    writer.close()
    return work.replace(folder)


def _fitting(shape: FolderShape, vocabulary: int, scale: int, layers: int | None) -> Any:
    """Returns the model on torch's meta device, with as many layers as fit."""
    import torch
    from transformers import AutoModelForCausalLM

    most = layers or shape.settings["num_hidden_layers"]
    for count in range(most, 0, -1):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(shape.config(vocabulary, scale, count), dtype=torch.bfloat16)
        if sum(2 * parameter.numel() for parameter in model.parameters()) <= shape.most_bytes:
            return model
    raise ModelError(f"not one layer of {shape.model_type} fits into {shape.most_bytes} bytes")


def _drawn(model: Any) -> Iterator[tuple[str, Any]]:
    """Yields the tensors of a checkpoint. Each module is made, filled as the model fills it before training, and
    dropped."""
    import torch

    left_out = set(model.all_tied_weights_keys)
    for prefix, module in model.named_modules():
        names = [name for name, _ in module.named_parameters(recurse=False)]
        if not names:
            continue
        module.to_empty(device="cpu", recurse=False)
        with torch.no_grad():
            model._init_weights(module)
        for name in names:
            full = f"{prefix}.{name}"
            if full not in left_out:
                yield from _as_published(full, getattr(module, name).detach())
        module._apply(lambda tensor: torch.empty_like(tensor, device="meta"), recurse=False)


def _as_published(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
    """Yields a tensor, or those of its experts, which checkpoints have one by one."""
    found = _STACKED.fullmatch(name)
    if found is None:
        yield name, tensor
        return
    for number, expert in enumerate(tensor):
        at = f"{found[1]}{number}"
        if found[2] == "down_proj":
            yield f"{at}.down_proj.weight", expert
        else:
            gate, up = expert.chunk(2)
            yield f"{at}.gate_proj.weight", gate
            yield f"{at}.up_proj.weight", up


HYBRID_4B = FolderShape(
    model_type="qwen3_5_text",
    settings={
        "num_hidden_layers": 32,
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "tie_word_embeddings": True,
    },
    widths=("hidden_size", "intermediate_size"),
)
LATENT_MIXTURE = FolderShape(
    model_type="deepseek_v2",
    settings={
        "num_hidden_layers": 27,
        "hidden_size": 2048,
        "intermediate_size": 10_944,
        "moe_intermediate_size": 1408,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
    },
    widths=("hidden_size", "intermediate_size", "moe_intermediate_size"),
)
DENSE_3B = FolderShape(
    model_type="qwen2",
    settings={
        "num_hidden_layers": 36,
        "hidden_size": 2048,
        "intermediate_size": 11_008,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    widths=("hidden_size", "intermediate_size"),
)
