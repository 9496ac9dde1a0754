"""Quantises the weights in a folder once. What is made is kept with the converted models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig

from diskprefix.errors import ModelError, SettingsError
from diskprefix.model.load.fingerprint import weights_digest
from diskprefix.model.load.fit import Check, enough_to_make, needs_of_checkpoint
from diskprefix.model.load.gguf_file import file_stamp
from diskprefix.model.load.made_once import build_once, require_disk
from diskprefix.model.load.published import read_config, require_plain_weights
from diskprefix.model.load.served_tensors import QUANTISED
from diskprefix.model.load.stored_tensors import stored_tensors
from diskprefix.model.quants.quantised import (
    FILE,
    is_quantised,
    save_configurations,
)
from diskprefix.model.quants.streamed import StreamedQuantising
from diskprefix.native.library import has_rows
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
    if not is_made:
        require_plain_weights(str(folder), read_config(folder))
    if is_made or weights in QUANTISED:
        if dtype is not torch.bfloat16:
            name = str(dtype).removeprefix("torch.")
            raise SettingsError(
                f"--weights: quantised weights compute in bfloat16, not in {name}; add --dtype bfloat16"
            )
        if device.type != "cpu":
            raise SettingsError(f"--weights: quantised weights are for the CPU, and the device is {device}")
    if is_made or weights not in QUANTISED:
        return files

    def build(work: Path) -> Path:
        made = work / "model"
        made.mkdir()
        _quantise(folder, files, config, kind, weights, made, report, check)
        return made

    digest = weights_digest(files)
    # The number changes with what is made.
    lines = "-rows" if has_rows() else ""
    name = f"{folder.resolve().name[:100]}-{digest[:12]}-{weights}{lines}.5"
    return [build_once(name, build, report) / FILE]


def _quantise(
    folder: Path,
    files: list[Path],
    config: PreTrainedConfig,
    kind: ModelKind,
    weights: str,
    made: Path,
    report: Report,
    check: Check,
) -> None:
    stored = stored_tensors(folder, files)
    skeleton = kind.skeleton(config)
    shapes = [tensor.header for tensor in stored.values()]
    needs = needs_of_checkpoint(folder.name, shapes, read_config(folder), weights, "bfloat16")
    check(needs)
    require_disk(made.parent, needs.disk_bytes)
    before = [file_stamp(file) for file in files]
    sources = {name: tensor.read for name, tensor in stored.items()}
    total = sum(parameter.numel() for parameter in skeleton.parameters())
    with progress_bar(f"quantising {folder.name} to {weights}", total, report) as advance:
        streamed = StreamedQuantising(sources, weights, made, lambda done: advance(min(done, total)))
        model = streamed.run(*kind.model_class(config))
    if [file_stamp(file) for file in files] != before:
        raise ModelError(f"the weights in {folder} were changed while they were read; start again")
    model.generation_config = generation_config_of(folder) or model.generation_config
    save_configurations(model, made)


def generation_config_of(folder: Path) -> GenerationConfig | None:
    """Returns that of the model's own folder, which holds more than weights."""
    return GenerationConfig.from_pretrained(folder) if (folder / "generation_config.json").is_file() else None
