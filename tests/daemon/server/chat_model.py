"""A chat model of a few hundred kilobytes with random weights, as a folder that `--model` takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.runtimes import RUNTIME

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB_SIZE = 512
POSITIONS = 2048

CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
You may call these functions:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' and loop.first %}{{ raise_exception('a tool cannot speak first') }}{% endif -%}
<|im_start|>{{ message.role }}
{% if enable_thinking %}/think {% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<call>{{ call.function.name }}
{%- for name, value in call.function.arguments.items() %} {{ name }}={{ value }}{% endfor %}</call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

_CORPUS = [
    "You are a careful assistant that answers questions about rivers, mountains and cities.",
    "Name three rivers and tell me where each of them begins and where it ends.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n",
    '{"type": "function", "function": {"name": "get_weather", "parameters": {"city": "Oslo"}}}',
]


def write_tokenizer(
    folder: Path,
    *,
    chat_template: str | None = CHAT_TEMPLATE,
    more_special_tokens: Sequence[str] = (),
    more_texts: Sequence[str] = (),
) -> None:
    """Byte-level BPE trained on a few lines and `more_texts`, with ChatML's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[*SPECIAL_TOKENS, *more_special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*_CORPUS * 4, *more_texts], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>", unk_token="<|endoftext|>"
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)


def write_chat_model(
    folder: Path,
    *,
    chat_template: str | None = CHAT_TEMPLATE,
    seed: int = 7,
    positions: int = POSITIONS,
    runtime: str = RUNTIME,
) -> Path:
    """Two layers in float32. The weights are in a form that `runtime` reads."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=positions,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    write_tokenizer(folder, chat_template=chat_template)
    if runtime == "llama":
        from tests.runtime.plan.llama_file import write_llama_file

        config.save_pretrained(folder)
        write_llama_file(model, folder)
    else:
        model.save_pretrained(folder)
    return folder


def weights_of(folder: Path) -> Path:
    """The file with the weights of a model that `write_chat_model` wrote."""
    (file,) = (file for file in folder.iterdir() if file.suffix in (".gguf", ".safetensors"))
    return file
