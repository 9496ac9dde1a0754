"""Quantises the weights in a folder once. What is made is kept with the converted models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from diskprefix.errors import ModelError
from diskprefix.model.load.fingerprint import weights_digest
from diskprefix.model.load.fit import Check, enough_to_make, needs_of_checkpoint
from diskprefix.model.load.gguf_file import file_stamp
from diskprefix.model.load.made_once import build_once, require_disk
from diskprefix.model.load.published import read_config, require_plain_weights
from diskprefix.model.load.safetensors_header import SAFETENSORS, stored_tensors
from diskprefix.model.load.served_tensors import QUANTISED
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
    report: Report,
    check: Check = enough_to_make,
) -> list[Path]:
    """Returns the weight files of a model in the form `weights`, which are made on first use. Raises `ModelError` if
    the model cannot have it or `check` does."""
    require_plain_weights(str(folder), read_config(folder))
    if weights not in QUANTISED:
        return files

    def build(work: Path) -> Path:
        made = work / "model"
        made.mkdir()
        _quantise(folder, files, config, kind, weights, made, report, check)
        return made

    digest = weights_digest(files)
    # The number changes with what is made.
    lines = "-rows" if has_rows() else ""
    name = f"{folder.resolve().name[:100]}-{digest[:12]}-{weights}{lines}.6"
    return sorted(build_once(name, build, report).glob(SAFETENSORS))


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
    needs = needs_of_checkpoint(folder.name, stored, read_config(folder), weights, "bfloat16")
    check(needs)
    require_disk(made.parent, needs.disk_bytes)
    before = [file_stamp(file) for file in files]
    sources = {tensor.name: tensor.read for tensor in stored}
    total = sum(parameter.numel() for parameter in skeleton.parameters())
    with progress_bar(f"quantising {folder.name} to {weights}", total, report) as advance:
        streamed = StreamedQuantising(sources, weights, made, lambda done: advance(min(done, total)))
        streamed.run(*kind.model_class(config))
    if [file_stamp(file) for file in files] != before:
        raise ModelError(f"the weights in {folder} were changed while they were read; start again")
