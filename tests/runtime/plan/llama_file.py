"""Writes a Llama of transformers as a `.gguf` file that llama.cpp's library reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.runtime.plan.tiny import finish


def write_llama_file(model: Any, folder: Path) -> Path:
    """Writes a `LlamaForCausalLM` in float32, with the byte-level tokenizer and the chat template of `folder`, as
    `folder/NAME.gguf`, where `NAME` is that of the folder. Returns the file."""
    from gguf import MODEL_ARCH, GGUFWriter, get_tensor_name_map

    config, path = model.config, folder / f"{folder.name}.gguf"
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // heads)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, folder, config)
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        rows = tensor.float().numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            rows = _interleaved(rows, heads if "q_proj" in name else kv_heads)
        found = names.get_name(name, try_suffixes=(".weight",))
        assert found is not None, name
        writer.add_tensor(found, rows)
    finish(writer)
    return path


def _interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Returns the rows of a projection in llama.cpp's order: it rotates neighbours, transformers the two halves."""
    halves = rows.reshape(heads, 2, -1, rows.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def _add_tokenizer(writer: Any, folder: Path, config: Any) -> None:
    from gguf import TokenType

    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["content"] for token in tokenizer["added_tokens"]}
    vocabulary = {id_: token for token, id_ in tokenizer["model"]["vocab"].items()}
    vocabulary |= {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    # Ids without a token have no text in a reply, as with the folder.
    tokens = [vocabulary.get(id_, f"[PAD{id_}]") for id_ in range(config.vocab_size)]
    kinds = {id_: TokenType.NORMAL for id_, token in vocabulary.items() if token not in special}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.get(id_, TokenType.CONTROL) for id_ in range(config.vocab_size)])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    template = folder / "chat_template.jinja"
    if template.is_file():
        writer.add_chat_template(template.read_text(encoding="utf-8"))
