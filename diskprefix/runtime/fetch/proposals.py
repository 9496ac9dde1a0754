"""The short names of models of the hub: the table of models, and the shapes from which their sizes follow."""

from __future__ import annotations

import os
from functools import cache
from math import prod

from msgspec import Struct

from diskprefix.errors import SettingsError
from diskprefix.nearest import nearest
from diskprefix.printable import shown
from diskprefix.runtime.runtime_options import EMBEDDED_NAME

_TABLE = """
short name, repository and quant, billions of parameters, read for each token, vocabulary, width, tied, full layers,
windowed layers, in 16 bits, encoder, bits, context in 1024 tokens, good enough for agents
qwen3.5:2b unsloth/Qwen3.5-2B-GGUF:Q4_K_M 1.88 - 248320 2048 yes 6x2x256x4 - 0.38 0.33 4.8 256 no
qwen3.5:4b unsloth/Qwen3.5-4B-GGUF:Q4_K_M 4.21 - 248320 2560 yes 8x4x256x4 - 1 0.33 4.8 256 yes
qwen3.5:9b unsloth/Qwen3.5-9B-GGUF:Q4_K_M 8.95 - 248320 4096 no 8x4x256x4 - 1.6 0.46 4.8 256 yes
qwen3.6:35b unsloth/Qwen3.6-35B-A3B-GGUF:UD-Q4_K_M 34.66 3 248320 2048 no 10x2x256x8 - 1 0.45 5.1 256 yes
gemma4:e2b unsloth/gemma-4-E2B-it-GGUF:Q4_K_M 4.63 2.3 262144 1536 yes 3x1x512x8 12x1x256/512 2.3 0.49 5.1 128 no
gemma4:e4b unsloth/gemma-4-E4B-it-GGUF:Q4_K_M 7.52 4.7 262144 2560 yes 4x2x512x4 20x2x256/512 2.8 0.49 5.1 128 yes
gemma4:26b unsloth/gemma-4-26B-A4B-it-GGUF:UD-Q4_K_M 25.2 3.8 262144 2816 yes 5x2x512x8 25x8x256/1024 - 0.59 5.1 256 yes
gpt-oss:20b ggml-org/gpt-oss-20b-GGUF:MXFP4 20.91 3.6 201088 2880 no 12x8x64x8 12x8x64/128 - - 4.5 128 yes
glm-4.7-flash unsloth/GLM-4.7-Flash-GGUF:Q4_K_M 29.94 3 154880 2048 no 47x1x288x38 - - - 4.8 198 yes
qwen3-coder:30b unsloth/Qwen3-Coder-30B-A3B-Instruct-GGUF:Q4_K_M 30.53 3.3 151936 2048 no 48x4x128x8 - - - 4.8 256 yes
devstral:24b unsloth/Devstral-Small-2507-GGUF:Q4_K_M 23.57 - 131072 5120 no 40x8x128x4 - - - 4.8 128 yes
qwen3:30b unsloth/Qwen3-30B-A3B-GGUF:Q4_K_M 30.53 3.3 151936 2048 no 48x4x128x8 - - - 4.8 40 yes
qwen3:14b unsloth/Qwen3-14B-GGUF:Q4_K_M 14.77 - 151936 5120 no 40x8x128x5 - - - 4.8 40 yes
qwen3:8b unsloth/Qwen3-8B-GGUF:Q4_K_M 8.19 - 151936 4096 no 36x8x128x4 - - - 4.8 40 yes
qwen3:4b unsloth/Qwen3-4B-GGUF:Q4_K_M 4.02 - 151936 2560 yes 36x8x128x4 - - - 4.8 40 no
qwen3:1.7b unsloth/Qwen3-1.7B-GGUF:Q4_K_M 1.72 - 151936 2048 yes 28x8x128x2 - - - 4.8 40 no
qwen3:0.6b unsloth/Qwen3-0.6B-GGUF:Q4_K_M 0.596 - 151936 1024 yes 28x8x128x2 - - - 4.8 40 no
qwen2.5-coder:14b Qwen/Qwen2.5-Coder-14B-Instruct-GGUF:Q4_K_M 14.77 - 152064 5120 no 48x8x128x5 - - - 4.8 32 no
qwen2.5-coder:7b Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M 7.62 - 152064 3584 no 28x4x128x7 - - - 4.8 32 no
qwen2.5-coder:3b Qwen/Qwen2.5-Coder-3B-Instruct-GGUF:Q4_K_M 3.4 - 151936 2048 no 36x2x128x8 - - - 4.8 32 no
qwen2.5-coder:1.5b Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:Q4_K_M 1.78 - 151936 1536 no 28x2x128x6 - - - 4.8 32 no
qwen2.5-coder:0.5b Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF:Q4_K_M 0.63 - 151936 896 no 24x2x64x7 - - - 4.8 32 no
llama3.1:8b bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M 8.03 - 128256 4096 no 32x8x128x4 - - - 4.8 128 no
llama3.2:3b bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M 3.21 - 128256 3072 yes 28x8x128x3 - - - 4.8 128 no
llama3.2:1b bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M 1.24 - 128256 2048 yes 16x8x64x4 - - - 4.8 128 no
gemma3:27b ggml-org/gemma-3-27b-it-GGUF:Q4_K_M 27 - 262144 5376 yes 10x16x128x2 52x16x128/1024 - 0.42 4.8 128 no
gemma3:12b ggml-org/gemma-3-12b-it-GGUF:Q4_K_M 11.77 - 262144 3840 yes 8x8x256x2 40x8x256/1024 - 0.42 4.8 128 no
gemma3:4b ggml-org/gemma-3-4b-it-GGUF:Q4_K_M 3.88 - 262144 2560 yes 5x4x256x2 29x4x256/1024 - 0.42 4.8 128 no
gemma3:1b ggml-org/gemma-3-1b-it-GGUF:Q4_K_M 1 - 262144 1152 yes 4x1x256x4 22x1x256/512 - - 4.8 32 no
gemma3:270m ggml-org/gemma-3-270m-it-GGUF:Q8_0 0.268 - 262144 640 yes 3x1x256x4 15x1x256/512 - - 8.5 32 no
ministral-3:14b unsloth/Ministral-3-14B-Instruct-2512-GGUF:Q4_K_M 13.5 - 131072 5120 no 40x8x128x4 - - 0.42 4.8 256 yes
ministral-3:8b mistralai/Ministral-3-8B-Instruct-2512-GGUF:Q4_K_M 8.49 - 131072 4096 no 34x8x128x4 - - 0.42 4.8 256 yes
ministral-3:3b mistralai/Ministral-3-3B-Instruct-2512-GGUF:Q4_K_M 3.43 - 131072 3072 yes 26x8x128x4 - - 0.42 4.8 256 no
mistral:7b bartowski/Mistral-7B-Instruct-v0.3-GGUF:Q4_K_M 7.25 - 32768 4096 no 32x8x128x4 - - - 4.8 32 no
phi4:14b unsloth/phi-4-GGUF:Q4_K_M 14.66 - 100352 5120 no 40x10x128x4 - - - 4.8 16 no
phi4-mini:3.8b unsloth/Phi-4-mini-instruct-GGUF:Q4_K_M 3.84 - 200064 3072 yes 32x8x128x3 - - - 4.8 128 no
granite4:micro ibm-granite/granite-4.0-micro-GGUF:Q4_K_M 3.4 - 100352 2560 yes 40x8x64x5 - - - 4.8 128 no
lfm2:8b LiquidAI/LFM2-8B-A1B-GGUF:Q4_K_M 8.34 1.5 65536 2048 yes 6x8x64x4 - - - 4.8 32 no
lfm2:1.2b LiquidAI/LFM2-1.2B-GGUF:Q4_K_M 1.17 - 65536 2048 yes 6x8x64x4 - - - 4.8 32 no
deepseek-r1:8b unsloth/DeepSeek-R1-0528-Qwen3-8B-GGUF:Q4_K_M 8.19 - 151936 4096 no 36x8x128x4 - - - 4.8 128 no
deepseek-r1:1.5b bartowski/DeepSeek-R1-Distill-Qwen-1.5B-GGUF:Q4_K_M 1.78 - 151936 1536 no 28x2x128x6 - - - 4.8 128 no
smollm2:1.7b HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF:Q4_K_M 1.71 - 49152 2048 yes 24x32x64x1 - - - 4.8 8 no
smollm2:360m bartowski/SmolLM2-360M-Instruct-GGUF:Q4_K_M 0.362 - 49152 960 yes 32x5x64x3 - - - 4.8 8 no
smollm2:135m SmolLM2-135M-Instruct 0.1345 - 49152 576 yes 30x3x64x3 - - - 5 8 no
"""
"""The table of models. Parameters are in billions, without the encoder of pictures; a mixture reads only a part of them
for each token. Parts in 16 bits have these in memory, whatever the file has. Tied: the table of tokens is the last
matrix, too. Layers are layers × key-value heads × size of a head × queries of such a head, those with a window with its
length; GLM's latents count as half a head each for keys and values. Shapes are from the makers' `config.json` and from
the files; files of Qwen2.5 have the table of tokens twice. Bits are bits per weight in a layer: 4.8 in Q4_K_M (half of
two matrices is Q6_K), 5.1 where the file's maker gives some layers more, 4.5 in MXFP4 with attention in Q8_0. Good
enough for agents are models whose makers publish tool calls of many turns, from 4 billion parameters on: this was not
measured here. The embedded model is the one without a quant, and has Q4_1."""
_LATEST = {
    **{name: f"{name}:{size}" for name, size in (("llama3.1", "8b"), ("llama3.2", "3b"), ("qwen3", "8b"))},
    **{name: f"{name}:{size}" for name, size in (("qwen2.5-coder", "7b"), ("qwen3-coder", "30b"), ("gemma3", "4b"))},
    **{name: f"{name}:{size}" for name, size in (("gemma4", "e4b"), ("gpt-oss", "20b"), ("devstral", "24b"))},
    **{name: f"{name}:{size}" for name, size in (("ministral-3", "8b"), ("mistral", "7b"), ("phi4", "14b"))},
    **{name: f"{name}:{size}" for name, size in (("phi4-mini", "3.8b"), ("granite4", "micro"), ("deepseek-r1", "8b"))},
    **{name: f"{name}:{size}" for name, size in (("qwen3.5", "9b"), ("qwen3.6", "35b"), ("smollm2", "135m"))},
}
"""Names without a tag, which mean the size that Ollama takes, but for `smollm2`: the one that is here without a hub. A
family is not in it if Ollama takes a size that is not in the table."""
_NARROW_BITS, _BLOCK_NUMBERS = 5.6, 256
"""Bits per weight in Q4_K_M if rows do not fill blocks of 256 numbers: other quants are used instead."""
Q4_K_M_BITS = 4.8


class ShortName(Struct, frozen=True, kw_only=True):
    """A row of the table of models. `kv` and `windowed` are the numbers of keys and values of a token in layers that
    see all tokens, and in layers that see `window` tokens; `queries` of a layer share a head of them."""

    name: str
    source: str
    parameters: float
    used: float
    vocab: int
    width: int
    is_tied: bool
    kv: int
    queries: int
    windowed: int
    window: int
    wide: float
    encoder: float
    bits: float
    positions: int
    suits_agents: bool

    @property
    def quant(self) -> str:
        return self.source.partition(":")[2] or "Q4_1"

    @property
    def weights_bytes(self) -> int:
        """The bytes of the `.gguf` file: parameters times bits. The last matrix has 6.6 (Q6_K), and a table of tokens
        of its own 4.5 (Q4_K). Rows that do not fill blocks have more."""
        table, is_narrow = self.vocab * self.width, bool(self.width % _BLOCK_NUMBERS)
        last_bits, table_bits = (8.5, 5.5) if is_narrow else (6.5625, 4.5)
        layer_bits = _NARROW_BITS if is_narrow and self.bits == Q4_K_M_BITS else self.bits
        layers = self.parameters * 1e9 - table * (1 if self.is_tied else 2)
        return int((layers * layer_bits + table * (last_bits + (0 if self.is_tied else table_bits))) / 8)

    @property
    def encoder_bytes(self) -> int:
        """The bytes of the encoder of pictures, which is fetched with the model; 0 without one."""
        return int(self.encoder * 2e9)

    @property
    def download_bytes(self) -> int:
        return self.weights_bytes + self.encoder_bytes

    @property
    def widened_bytes(self) -> int:
        """The bytes of memory that weights take beyond the file's, because they have 16 bits there."""
        return int(self.wide * 1e9 * (16 - self.bits) / 8)

    @property
    def used_bytes(self) -> int:
        """The bytes of weights that are read for each token of a prompt."""
        return int(self.weights_bytes * self.used / self.parameters)

    def attended_bytes(self, num_tokens: int) -> int:
        """Returns what attention adds to `used_bytes` for a token of a prompt of `num_tokens`, on average: the bytes of
        weights that take as many multiplications."""
        seen = self.kv * num_tokens // 2 + self.windowed * self.window
        return int(seen * self.queries * Q4_K_M_BITS / 8)

    @property
    def is_plain(self) -> bool:
        """All its layers are attention and one dense network, which our operators compute fastest."""
        return self.used == self.parameters and not self.wide


@cache
def short_names() -> dict[str, ShortName]:
    """Returns the rows of the table of models by name."""
    return {row.name: row for row in map(_row, _TABLE.strip().splitlines()[2:])}


def _row(line: str) -> ShortName:
    name, source, parameters, used, vocab, width, tied, full, windowed, wide, encoder, bits, context, yes = line.split()

    def numbers(layers: str) -> int:
        """Returns the numbers of keys and values of a token."""
        return 2 * prod(map(int, layers.split("x")))

    def number(text: str) -> float:
        return 0.0 if text == "-" else float(text)

    all_layers, _, queries = full.rpartition("x")
    layers, _, window = windowed.partition("/")
    return ShortName(
        name=name,
        source=source,
        parameters=float(parameters),
        used=number(used) or float(parameters),
        vocab=int(vocab),
        width=int(width),
        is_tied=tied == "yes",
        kv=numbers(all_layers),
        queries=int(queries),
        windowed=numbers(layers) if window else 0,
        window=int(window or 0),
        wide=number(wide),
        encoder=number(encoder),
        bits=float(bits),
        positions=int(context) * 1024,
        suits_agents=yes == "yes",
    )


def short_name(model: str) -> ShortName | None:
    """Returns the row of a short name or of its repository, in any case, with or without `:latest`; else None."""
    asked = model.lower().removesuffix(":latest")
    if (proposal := short_names().get(_LATEST.get(asked, asked))) is not None:
        return proposal
    return next((row for row in short_names().values() if row.source.lower() == asked), None)


def full_name(model: str) -> str:
    """Returns the repository of a short name. Any other name stays as it is. Nothing is read: clients send names."""
    return model if (row := short_name(model)) is None else row.source


def names_meant(model: str) -> tuple[str, ...]:
    """Returns the other names of the model of a short name: with its tag, as Ollama has it, and its repository."""
    return () if (row := short_name(model)) is None else (row.name, row.source)


_SHORT_NAMES = "`diskprefix list --available` lists the short names"


def short_names_hint(model: str) -> str:
    """Returns the short names of the family of an unknown one (all sizes of `lfm2`), or else how to see all."""
    family = model.lower().partition(":")[0]
    sizes = [name for name in short_names() if name.partition(":")[0] == family]
    return f"{family} has the short names {', '.join(sizes)}" if sizes else _SHORT_NAMES


def meant_name(model: str) -> str:
    """Returns `full_name` of what a user names on this machine, where the name of a file, a folder or another program's
    model stays as it is."""
    if (name := full_name(model)) == model or os.path.exists(model):
        return model
    # It imports what reads models, and no start of a command needs it.
    from diskprefix.runtime.fetch.found_models import found_model

    return next((known for known in (model, *names_meant(model)) if found_model(known) is not None), name)


def require_repository(model: str) -> str:
    """Returns `meant_name` of a model to fetch: a repository, or the embedded model. Raises `SettingsError` for a name
    that no repository can have."""
    if "/" not in (name := meant_name(model)) and name != EMBEDDED_NAME:
        near = nearest(model, short_names())
        hint = f"did you mean {near}? {short_names_hint(model)}" if near else short_names_hint(model)
        raise SettingsError(f"no model has the short name {shown(model)!r}; {hint}; others are ORG/NAME")
    return name
