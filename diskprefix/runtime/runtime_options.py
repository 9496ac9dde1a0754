"""The options of a runtime: which model, where and how it computes."""

# ruff: noqa: RUF009 - option makes a field

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from diskprefix.errors import SettingsError
from diskprefix.prefixstore.store_options import MAX_BUDGET, StoreOptions
from diskprefix.setting import CACHE, MODEL, option, settings_of

EMBEDDED_NAME = "SmolLM2-135M-Instruct"
"""The model that needs no hub: its file is in a package of the Python package index."""
SAMPLING_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
"""The bounds of the values of `--sampling`, as in requests."""
_NEUTRAL = dict.fromkeys(("temperature", "top_p", "repetition_penalty"), 1.0)
_NEUTRAL |= {"top_k": 0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""The values that leave the model's probabilities as they are."""
_SAMPLING_WORDS = ("model", "neutral")

_model, _cache = partial(option, MODEL), partial(option, CACHE)


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions(StoreOptions):
    """The options of `load_servable`, and of the store that its model has."""

    model: str | None = _model(
        None,
        "A Hugging Face hub id (org/name, org/name:quant), a short name (qwen3.5:4b), a folder, a .gguf file, or the "
        "name of a model that Ollama, LM Studio or llama.cpp has here. Several models (separated by commas, or one "
        "--model each) are loaded when requests name them.",
        is_common=True,
        metavar="ID|PATH",
        unset=f"the embedded {EMBEDDED_NAME}",
    )
    device: str = _model(
        "auto",
        "cpu, cuda (AMD too), cuda:1, xpu (Intel), mps, Vulkan0 and so on. auto uses an accelerator if there is one.",
        is_common=True,
        metavar="NAME",
        parts_cache=True,
    )
    runtime: str = _model(
        "auto",
        "plan (CPUs), llama (llama.cpp's library) or grid (transformers); auto takes llama if it has a GPU.",
        is_common=True,
        choices=("auto", "plan", "llama", "grid"),
        parts_cache=True,
    )
    gpu_layers: int | None = _model(
        None,
        "With --runtime llama, the number of layers that the GPU computes. The CPU computes the others.",
        kind="integer",
        bounds=(0, 10_000),
        unset="as many as have room there",
        parts_cache=True,
    )
    dtype: str = _model(
        "auto",
        "The data type of the computation. auto uses the type of the weights.",
        choices=("auto", "bfloat16", "float16", "float32"),
        parts_cache=True,
    )
    weights: str = _model(
        "auto",
        "The weights in memory. auto keeps the quantization of a .gguf file, native unpacks it.",
        is_common=True,
        choices=("auto", "native"),
        parts_cache=True,
    )
    packed_weights: str = _model(
        "auto",
        "The folder where weights stay as a CPU computes with them: the next start maps them instead of packing them "
        "again. A file takes as much as the model's, and is made once, in idle time, if the disk has room. auto: "
        "$XDG_CACHE_HOME/diskprefix/weights.",
        metavar="auto|off|PATH",
    )
    kv_type: str = _model(
        "auto",
        "The data type of keys and values in memory and on disk: auto (the type of the computation) or q8 (8 bits, "
        "about half the size; three quarters for Qwen2 models, whose keys keep their type).",
        choices=("auto", "q8"),
        parts_cache=True,
    )
    kernels: str = _model(
        "auto",
        "The operators on a CPU: auto (the best compiled variant for it), a variant such as avx2, or torch.",
        metavar="auto|torch|VARIANT",
        parts_cache=True,
    )
    rows: str = _model(
        "8",
        "What the rows before a product with quantized weights become on a CPU: integers of 8 bits or 15 bits (closer, "
        "slower), with the same bits on every CPU; or bf16 (fast prompts, slower replies), which needs AMX and "
        "shares saved prefixes with such CPUs only.",
        choices=("8", "15", "bf16"),
        parts_cache=True,
    )
    served_model_name: str | None = _model(
        None, "The model's name in the API.", is_common=True, metavar="NAME", unset="the model's own"
    )
    chat_template: Path | None = _model(None, "A Jinja chat template file.", kind="file", unset="the model's own")
    speculative: str = _model(
        "auto",
        "Speculative decoding where it is faster; replies do not change. ngram drafts from earlier text that a reply "
        "repeats, mtp with the draft layer that some models have, auto with both.",
        is_common=True,
        choices=("off", "ngram", "mtp", "auto"),
        parts_cache=True,
    )
    draft_model: str | None = _model(
        None,
        "A smaller model with the same vocabulary that also drafts tokens. It uses part of --kv-memory.",
        metavar="ID|PATH",
        unset="none",
    )
    sampling: str = _model(
        "model",
        "How requests that do not say it are sampled. model: as the model's files say, for the rest temperature=0.8, "
        "top_p=0.95, top_k=40, min_p=0.05. neutral: by the model's own probabilities. Values go above both: "
        "temperature, top_p, top_k, min_p, repetition_penalty, presence_penalty, frequency_penalty.",
        metavar="model|neutral|NAME=VALUE,…",
    )
    max_sequences: int = _model(
        8,
        "The maximum number of replies computed at once; each API key may always have one.",
        is_common=True,
        bounds=(1, 1024),
    )
    kv_memory: int | None = _model(
        None,
        "Memory for the state of requests; it limits the context. A request that does not fit beside others waits.",
        is_common=True,
        kind="size",
        unset="half of what the weights leave free",
        bounds=(1024**2, MAX_BUDGET),
    )
    context: int | None = _model(
        None,
        "The maximum number of tokens of a prompt and its reply. Models with two sets of RoPE factors, such as Phi-3.5 "
        "and Phi-4-mini, use those for short texts if it is not above their original length, or else those for long "
        "ones; what was saved with one set is not found with the other.",
        kind="integer",
        metavar="N",
        unset="all that the model takes and --kv-memory has room for; factors for long texts",
        bounds=(16, 1 << 30),
        parts_cache=True,
    )
    fingerprint: str = _cache(
        "strict",
        "strict: use saved state only where the model computes the same bits. portable: share it between machines with "
        "different kernels, devices and library versions.",
        choices=("strict", "portable"),
        parts_cache=True,
    )

    @property
    def samples_as_model(self) -> bool:
        """False if nothing that the model's files say of sampling is used."""
        return "neutral" not in self._sampling_words

    @property
    def sampling_values(self) -> dict[str, float]:
        """The numbers of `sampling` by the names that requests have for them. Raises `SettingsError`."""
        words = self._sampling_words
        if {"model", "neutral"} <= words:
            raise SettingsError("--sampling: model and neutral exclude each other")
        values: dict[str, float] = dict(_NEUTRAL) if "neutral" in words else {}
        for part in self.sampling.split(","):
            name, _, text = map(str.strip, part.partition("="))
            if not part.strip() or part.strip() in words:
                continue
            if name not in SAMPLING_BOUNDS:
                known = ", ".join((*SAMPLING_BOUNDS, *_SAMPLING_WORDS))
                raise SettingsError(f"--sampling: {name!r} is not one of {known}")
            minimum, maximum = SAMPLING_BOUNDS[name]
            try:
                values[name] = type(minimum)(text)
            except ValueError:
                raise SettingsError(f"--sampling: {name}={text} is not a number; write for example {name}=1") from None
            if not minimum <= values[name] <= maximum:
                raise SettingsError(f"--sampling: {name}={text} is out of range ({minimum:g} to {maximum:g})")
        return values

    @property
    def _sampling_words(self) -> set[str]:
        return {part.strip() for part in self.sampling.split(",")} & set(_SAMPLING_WORDS)

    @property
    def uses_draft_layer(self) -> bool:
        """True if the layer of a model that predicts further tokens is loaded."""
        return self.speculative in ("auto", "mtp")

    def require_readable(self) -> None:
        super().require_readable()
        _ = self.sampling_values
        if not self.packed_weights:
            raise SettingsError("--packed-weights: it is empty; give auto, off or a folder")

    def require_together(self) -> None:
        super().require_together()
        if self.draft_model is not None and self.speculative == "off":
            raise SettingsError("--draft-model: has no effect with --speculative off")


PARTING = tuple(name for name, setting in settings_of(RuntimeOptions).items() if setting.parts_cache)
"""The options that part the cache."""
