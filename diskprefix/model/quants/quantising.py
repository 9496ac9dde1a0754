"""Quantises the weights in a folder, or takes the quants that they were published with, once. What is made is kept with
the converted models."""

from __future__ import annotations

import hashlib
import json
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig

from diskprefix.errors import ModelError, SettingsError
from diskprefix.model.load.fingerprint import weights_digest
from diskprefix.model.load.fit import Check, needs_of_checkpoint, read_config
from diskprefix.model.load.gguf import build_once, enough_to_make, require_disk, suffix_of
from diskprefix.model.load.gguf_file import file_stamp
from diskprefix.model.load.stored_tensors import stored_tensors
from diskprefix.model.quants.published import PublishedWeights, Source, published_weights, settings_of
from diskprefix.model.quants.quantised import (
    FILE,
    is_quantised,
    quantisable_experts,
    save_configurations,
)
from diskprefix.model.quants.streamed import StreamedQuantising
from diskprefix.progress import Report, progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from diskprefix.model.load.kinds import ModelKind


def weight_files_in(
    weights: str,
    folder: Path,
    files: list[Path],
    config: PreTrainedConfig,
    kind: ModelKind,
    dtype: torch.dtype,
    device: torch.device,
    report: Report,
    check: Check = enough_to_make,
) -> list[Path]:
    """Returns the weight files of a model in the form `weights`, which are made on first use. Raises `SettingsError` if
    the form does not fit the dtype or the device, `ModelError` if the model cannot have it or `check` does."""
    is_made = is_quantised(files)
    published = None if is_made or weights == "native" else published_weights(config)
    if is_made or published is not None or weights in ("int8", "int4"):
        if dtype is not torch.bfloat16:
            name = str(dtype).removeprefix("torch.")
            raise SettingsError(
                f"--weights: quantised weights compute in bfloat16, not in {name}; add --dtype bfloat16"
            )
        if device.type != "cpu":
            raise SettingsError(f"--weights: quantised weights are for the CPU, and the device is {device}")
    if is_made or (published is None and weights not in ("int8", "int4")):
        return files
    require_served(published, weights)

    def build(work: Path) -> Path:
        made = work / "model"
        made.mkdir()
        _quantise(folder, files, config, kind, weights, published, made, report, check)
        return made

    digest = weights_digest(files)
    if published is not None:
        # It says what the bytes of the files mean.
        described = json.dumps(settings_of(config), sort_keys=True, default=str)
        digest = hashlib.sha256(f"{digest} {described}".encode()).hexdigest()
    name = f"{folder.resolve().name[:100]}-{digest[:12]}{suffix_of(weights)}"
    return [build_once(name, build, report) / FILE]


def require_served(published: PublishedWeights | None, weights: str) -> None:
    """Raises `ModelError` if no operator computes with the form that weights were published in, and they are to be kept
    so."""
    if published is not None and published.is_float8 and weights == "auto":
        raise ModelError(
            f"no operator of a CPU computes with {published.name} weights; add --weights int8 to quantise them anew"
        )


def computes_in_bfloat16(weights: str, config: PreTrainedConfig) -> bool:
    """Returns whether a model is quantised when it is loaded with `--weights`, whatever the type of its weights."""
    return weights in ("int8", "int4") or (weights == "auto" and published_weights(config) is not None)


def _quantise(
    folder: Path,
    files: list[Path],
    config: PreTrainedConfig,
    kind: ModelKind,
    weights: str,
    published: PublishedWeights | None,
    made: Path,
    report: Report,
    check: Check,
) -> None:
    stored = stored_tensors(folder, files)
    if published is not None:
        published.check(folder, stored)
    plain = _without_quants(config)
    skeleton = kind.skeleton(plain)
    singles = set[str]()
    if published is not None and (of_experts := published.experts(stored)):
        if any(quantisable_experts(skeleton)):
            singles = of_experts
        elif weights == "auto":
            raise ModelError(
                f"experts of this architecture are not served in {published.name} weights; add --weights int4 or int8"
            )
    shapes = [tensor.stored_shape for tensor in stored.values()]
    needs = needs_of_checkpoint(folder.name, shapes, read_config(folder), weights, "bfloat16")
    if published is None:
        what = f"quantising {folder.name} to {weights}"
    else:
        what = f"packing the {published.name} weights of {folder.name}"
    check(needs)
    require_disk(made.parent, needs.disk_bytes)
    before = [file_stamp(file) for file in files]
    sources: dict[str, Source] = {name: tensor.unread for name, tensor in stored.items()}
    if published is not None:
        sources = published.sources(stored, weights)
    total = sum(parameter.numel() for parameter in skeleton.parameters())
    with progress_bar(what, total, report) as advance:
        streamed = StreamedQuantising(sources, singles, weights, made, lambda done: advance(min(done, total)))
        model = streamed.run(*kind.model_class(plain))
    if [file_stamp(file) for file in files] != before:
        raise ModelError(f"the weights in {folder} were changed while they were read; start again")
    model.generation_config = generation_config_of(folder) or model.generation_config
    save_configurations(model, made)


def _without_quants(config: PreTrainedConfig) -> PreTrainedConfig:
    found = deepcopy(config)
    for part in (found, found.get_text_config(decoder=True)):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return found


def generation_config_of(folder: Path) -> GenerationConfig | None:
    """Returns that of the model's own folder, which holds more than weights."""
    return GenerationConfig.from_pretrained(folder) if (folder / "generation_config.json").is_file() else None
