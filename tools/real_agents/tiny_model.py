"""A random model that computes long prompts in no time, with the tokenizer and the chat template of a real one."""

from __future__ import annotations

import shutil
from pathlib import Path

POSITIONS = 131_072
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def write_tiny(folder: Path, real: Path, seed: int = 0) -> Path:
    """Writes the folder of a model of two layers in float32, with the tokenizer of the model in `real`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(real)
    config.update(
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": POSITIONS,
            "layer_types": ["full_attention"] * 2,
            "tie_word_embeddings": True,
            "dtype": "float32",
        }
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in _TOKENIZER_FILES:
        if (real / name).exists():
            shutil.copy(real / name, folder / name)
    return folder
