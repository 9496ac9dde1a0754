"""Quantises the weights in a folder, once. What is made is kept with the converted models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig

from diskprefix.errors import ModelError, SettingsError
from diskprefix.model.load.fingerprint import weights_digest
from diskprefix.model.load.gguf import SUFFIXES, build_once, require_disk
from diskprefix.model.load.memory import available_ram_bytes, require_memory, weights_bytes
from diskprefix.model.quants.quantised import FILE, is_quantised, quantise_and_save
from diskprefix.progress import Report

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
) -> list[Path]:
    """Returns the weight files of a model in the form `weights`, which are made on first use. Raises `SettingsError` if
    the form does not fit the dtype or the device, `ModelError` if the model cannot have it."""
    if is_quantised(files) or weights in ("int8", "int4"):
        if dtype is not torch.bfloat16:
            name = str(dtype).removeprefix("torch.")
            raise SettingsError(
                f"--weights: quantised weights compute in bfloat16, not in {name}; add --dtype bfloat16"
            )
        if device.type != "cpu":
            raise SettingsError(f"--weights: quantised weights are for the CPU, and the device is {device}")
    if is_quantised(files) or weights not in ("int8", "int4"):
        return files
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"--weights: the weights in {folder} are quantised already; add --weights native")

    def build(work: Path) -> Path:
        needed = weights_bytes(files, 1)
        require_memory(needed, available_ram_bytes(), what=f"quantising {folder.name}", advice="free some")
        require_disk(work, needed)
        report(f"quantising {folder.name} to {weights}; this is done once")
        model = kind.loader.from_pretrained(
            folder, config=config, dtype=dtype, local_files_only=True, trust_remote_code=False
        )
        made = work / "model"
        made.mkdir()
        quantise_and_save(model, weights, made, report)
        return made

    name = f"{folder.resolve().name[:100]}-{weights_digest(files)[:12]}{SUFFIXES[weights]}"
    return [build_once(name, build, report) / FILE]


def generation_config_of(folder: Path) -> GenerationConfig | None:
    """Returns that of the model's own folder, which holds more than weights."""
    return GenerationConfig.from_pretrained(folder) if (folder / "generation_config.json").is_file() else None
