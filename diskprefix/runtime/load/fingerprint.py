"""The identity of the numbers that a model computes on the grid. Two runs may share KV only if they have the same root.

README.md tells what belongs to it. A field of the configuration that is not known goes in, because a needless miss
costs time and a wrong hit gives a wrong answer.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diskprefix.identity import Fingerprint, canonical, plain
from diskprefix.memo import Memo
from diskprefix.runtime.files.gguf.gguf_file import file_stamp
from diskprefix.runtime.load.kernel_settings import (
    code_digest,
    cpu_kind,
    device_kind,
    environment,
    kernel_packages,
    matmul_precision,
    switches,
)
from diskprefix.tokens import file_digest

_VERSIONS = ("torch_version", "transformers_version", "gguf_version", "numpy_version")
_NOT_PORTABLE = ("device", "cpu", "kernels", "threads", *_VERSIONS)

_NO_NUMBERS = re.compile(
    # Where it came from and what wrote it.
    r"_?(base_)?(model_)?name_or_path|_commit_hash|_from_model_config|transformers_version|architectures|auto_map|license"
    # How far it may be used; `architecture` puts it back where RoPE computes with it.
    r"|max_position_embeddings|max_sequence_length|max_seq_len|n_positions|n_ctx|seq_length|model_max_length"
    # These have their own fields in the fingerprint.
    r"|dtype|torch_dtype|quantization_config"
    # Which tokens start and stop: the sampler's business. Models compute with the row of `pad_token_id`: Gemma 3n and 4
    # put it in the place of pictures, in the inputs of each layer.
    r"|(bos|eos|sep|cls|unk|mask|decoder_start|forced_bos|forced_eos)_token_id|suppress_tokens|begin_suppress_tokens"
    # Training.
    r"|initializer_range|initializer_factor|init_std|.*dropout.*|.*pdrop|gradient_checkpointing|router_aux_loss_coef"
    # Further results of a forward, and labels.
    r"|use_cache|return_dict|output_attentions|output_hidden_states|output_router_logits"
    r"|id2label|label2id|num_labels|problem_type|finetuning_task|task_specific_params"
)

_ROPE_WITHOUT_MAX_POSITIONS = frozenset({"default", "linear", "llama3", "proportional"})
"""The other kinds (dynamic, yarn, longrope, unknown ones) may compute with `max_position_embeddings`."""


def fingerprint_of_modules(model: Any, weights_digest: str, mode: str = "strict") -> Fingerprint:
    """Returns everything that changes the numbers of a loaded model of transformers. In mode `portable` the root leaves
    out the fields of `_NOT_PORTABLE`."""
    from importlib.metadata import version

    import torch

    config, is_cpu = model.config, model.device.type == "cpu"
    quantisation = getattr(config, "quantization_config", None)
    if_set = {
        # The installed packages whose kernels transformers uses instead of its own.
        "kernels": canonical(kernel_packages()),
        "switches": canonical(switches(model)),
        # Where the kernels of a CPU cut sums.
        "threads": str(torch.get_num_threads()) if is_cpu else "",
    }
    named = {
        "weights_digest": weights_digest,
        "model_class": type(model).__name__,
        "architecture": canonical(architecture(config.to_dict())),
        "dtype": plain(model.dtype),
        "quantisation": canonical(_as_dict(quantisation) if quantisation else {}),
        "adapters": _adapters(model),
        "attention": _implementations(config, "_attn_implementation"),
        "experts": _implementations(config, "_experts_implementation"),
        "matmul_precision": matmul_precision(),
        "environment": canonical(environment()),
        "device": device_kind(model.device),
        "cpu": cpu_kind() if is_cpu else "",
        "torch_version": torch.__version__,
        "transformers_version": version("transformers"),
        # Its tables make weights of quants; numpy computes with them.
        "gguf_version": version("gguf"),
        "numpy_version": version("numpy"),
        "code": code_digest(),
        "mode": mode,
    }
    left_out = _NOT_PORTABLE if mode == "portable" else ()
    return Fingerprint(named | {name: value for name, value in if_set.items() if value}, frozenset(left_out))


def architecture(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a configuration that change numbers, including fields of its sub-configurations."""
    kept = {
        key: architecture(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if not _NO_NUMBERS.fullmatch(key)
    }
    ropes = _rope_types(config.get("rope_parameters")) | _rope_types(config.get("rope_scaling"))
    if ropes - _ROPE_WITHOUT_MAX_POSITIONS:
        kept["max_position_embeddings"] = config.get("max_position_embeddings")
    return kept


def _rope_types(parameters: Any) -> set[str]:
    """Returns the RoPE kinds in `rope_parameters` (one dict, or one for each kind of layer) or in `rope_scaling`."""
    if not isinstance(parameters, Mapping):
        return set()
    own = {str(parameters[key]) for key in ("rope_type", "type") if key in parameters}
    return own.union(*(_rope_types(value) for value in parameters.values()))


def _implementations(config: Any, attribute: str) -> str:
    """Returns the kernels of a configuration and of those inside it: `sdpa`, or `sdpa,text_config=eager`."""
    names = [str(getattr(config, attribute, None) or "")]
    for key in sorted(getattr(config, "sub_configs", {})):
        inner = getattr(getattr(config, key, None), attribute, None)
        if inner:
            names.append(f"{key}={inner}")
    return ",".join(names)


def _adapters(model: Any) -> str:
    configs: Mapping[str, Any] = getattr(model, "peft_config", None) or {}
    if not configs:
        return ""
    active = getattr(model, "active_adapters", None)
    active = active() if callable(active) else active
    described = {
        name: {"config": architecture(_as_dict(config)), "content": _parameters_digest(model, name)}
        for name, config in configs.items()
    }
    return canonical({"active": sorted([active] if isinstance(active, str) else active or []), "adapters": described})


def _parameters_digest(model: Any, adapter: str) -> str:
    """Returns the SHA-256 of the parameters of one adapter, which peft names `….lora_A.<adapter>.weight`."""
    import torch

    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if adapter in name.split("."):
            content = parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            digest.update(f"{len(name)}:{name}:{parameter.dtype}:{tuple(parameter.shape)}:".encode())
            digest.update(content.tobytes())
    return digest.hexdigest()


def _as_dict(config: Any) -> dict[str, Any]:
    return dict(config) if isinstance(config, Mapping) else dict(config.to_dict())


def weights_digest(files: Sequence[Path], parts: Sequence[Path] = ()) -> str:
    """Returns the identity of the content of a model's weight files: 32 hex digits. Folders and times do not matter,
    nor do the names of `parts`, whose order is known."""
    return _joined([remembered_digest(file) for file in _ordered(files, parts)])


def known_weights_digest(files: Sequence[Path], parts: Sequence[Path] = ()) -> str | None:
    """Returns `weights_digest` without reading a file, None if one must be read for it. Raises `OSError`."""
    digests = [_remembered(file.resolve()) for file in _ordered(files, parts)]
    return None if None in digests else _joined([digest for digest in digests if digest is not None])


def _ordered(files: Sequence[Path], parts: Sequence[Path]) -> list[Path]:
    return [*sorted(files, key=lambda file: file.name), *parts]


def _joined(digests: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()[:32]


_digests = Memo("digests", version=4)


def remembered_digest(file: Path) -> str:
    """Returns `tokens.file_digest`, remembered until path, size, times or inode change. Raises `OSError`."""
    path = file.resolve()
    stamp = _stamp(path)
    if (known := _remembered(path)) is not None:
        return known
    digest = file_digest(path)
    if _stamp(path) == stamp and time.time() - path.stat().st_mtime > 2.0:
        # A younger file could change again without a visible change of its modification time.
        _digests.put(str(path), {"stamp": stamp, "digest": digest})
    return digest


def _remembered(path: Path) -> str | None:
    record = _digests.get(str(path))
    is_of_file = isinstance(record, dict) and record.get("stamp") == _stamp(path)
    return str(record["digest"]) if is_of_file and isinstance(record.get("digest"), str) else None


def _stamp(path: Path) -> list[int]:
    """Returns what changes when a file is written or replaced, also if its time is set back."""
    return [*file_stamp(path), path.stat().st_ctime_ns]
