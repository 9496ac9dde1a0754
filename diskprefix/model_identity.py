"""The identity of a model, whatever computes it: the content of its weight files, and the fields of its configuration
that change numbers."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diskprefix.file_system import file_stamp
from diskprefix.memo import Memo
from diskprefix.tokens import file_digest

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
