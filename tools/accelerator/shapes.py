"""Shapes of models, as folders that `--model` takes, without weights: `random_weights` makes these on the device.

The files are written with Python's own library, as a part may run where others are missing.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

_WORDS = (Path(__file__).parents[1] / "prompts" / "words.txt").read_text(encoding="utf-8").split()


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Llama in bfloat16. `prompts` are the lengths whose first token is measured, by the restarts after which they
    are asked again. The exactness of restores is checked with a prompt of `exact_tokens`, on a grid of `block`."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    num_weights: float
    block: int = 256
    exact_tokens: int = 8000
    prompts: tuple[tuple[int, ...], ...] = ((2048, 8192, 32_768), (131_072,))

    def prompt(self, num_tokens: int, seed: int) -> list[int]:
        """Returns token ids that depend on the arguments alone."""
        return random.Random(f"{num_tokens}-{seed}").choices(range(1, self.vocab), k=num_tokens)

    def write(self, folder: Path) -> Path:
        """Writes the model's folder and returns it. Each word is a token; there is none that ends a reply."""
        words = list(dict.fromkeys(["<unk>", *_WORDS]))
        words += [f"w{number}" for number in range(len(words), self.vocab)]
        vocab = {word: number for number, word in enumerate(words)}
        files = {
            "config": {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": self.hidden,
                "intermediate_size": self.intermediate,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads,
                "vocab_size": self.vocab,
                "max_position_embeddings": self.prompts[-1][-1] + 1024,
                "bos_token_id": None,
                "eos_token_id": None,
                "dtype": "bfloat16",
            },
            "tokenizer": {
                "version": "1.0",
                "added_tokens": [],
                "pre_tokenizer": {"type": "WhitespaceSplit"},
                "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
            },
            "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"},
        }
        folder.mkdir(parents=True)
        for name, content in files.items():
            (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
        # The loader wants a file of weights: this one holds a number that no model has.
        header = json.dumps({"none": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}).encode()
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(2))
        return folder


SHAPES = {
    "1B": Shape(hidden=2048, intermediate=8192, layers=16, heads=32, kv_heads=8, vocab=128_256, num_weights=1.5e9),
    "8B": Shape(hidden=4096, intermediate=14_336, layers=32, heads=32, kv_heads=8, vocab=128_256, num_weights=8.0e9),
    "tiny": Shape(
        hidden=64,
        intermediate=96,
        layers=2,
        heads=4,
        kv_heads=2,
        vocab=512,
        num_weights=1e5,
        block=16,
        exact_tokens=165,
        prompts=((512, 768),),
    ),
}
"""Those of Llama 3.2 1B (its output is a matrix of its own here) and Llama 3.1 8B, and one for the CPU."""
