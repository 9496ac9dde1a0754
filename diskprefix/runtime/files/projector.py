"""The file with the encoder of pictures of a `.gguf` model: it is in the same folder, with `mmproj` in its name."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from diskprefix.errors import ModelError
from diskprefix.printable import first_line
from diskprefix.progress import Report
from diskprefix.runtime.files.gguf.gguf_file import QUANT, read_tensors
from diskprefix.runtime.files.manifests import manifest_of

if TYPE_CHECKING:
    from diskprefix.runtime.files.gguf.encoders import PictureEncoder
    from diskprefix.runtime.files.gguf.metadata import Metadata

_UNNAMED = ("", "model")
_FORMS = ("", "BF16", "F16", "Q8_0", "F32")
"""The forms of an encoder's weights, best first. A file name without a form is the best."""


class Projector(Struct, frozen=True, kw_only=True, eq=False):
    """An encoder, its file, and what that says."""

    path: Path
    encoder: PictureEncoder
    metadata: Metadata


def preferred_projectors(names: Iterable[str], model: str) -> list[str]:
    """Returns the files with an encoder among these names, best first: files named like the model, then files named
    like no model, then the others; each in the order of forms."""
    projectors = [
        name for name in names if name.lower().endswith(".gguf") and "mmproj" in name.rpartition("/")[2].lower()
    ]
    own = _base(model)

    def rank(name: str) -> tuple[bool, bool, int, str]:
        form, base = QUANT.search(Path(name).stem), _base(name)
        asked = form[1].upper() if form else ""
        return base != own, base not in _UNNAMED, _FORMS.index(asked) if asked in _FORMS else len(_FORMS), name

    return sorted(projectors, key=rank)


def _base(name: str) -> str:
    """Returns a file's name without its form and without `mmproj`."""
    stem = QUANT.sub("", Path(name).name.removesuffix(".gguf"))
    return stem.lower().replace("mmproj", "").strip("-_.")


def projector_beside(gguf: Path, text: Metadata, report: Report = lambda _line: None) -> Projector | None:
    """Returns the encoder of a text model: the first that fits, in its manifest or in the same folder, in the order of
    `preferred_projectors`. Reports encoders that do not fit. Raises `ModelError` for a damaged one."""
    from diskprefix.runtime.files.gguf.encoders import HAVE_ENCODER, MAY_HAVE_ENCODER

    if text.architecture not in MAY_HAVE_ENCODER:
        return None
    if (manifest := manifest_of(gguf)) is not None:
        paths = manifest.projectors
    else:
        beside = preferred_projectors(os.listdir(gguf.parent), gguf.name)
        paths = [gguf.parent / name for name in beside]
    for path in paths:
        try:
            outcome = _read_projector(path, text)
        except OSError as error:
            raise ModelError(f"cannot read {path}: {first_line(error)}") from error
        if isinstance(outcome, Projector):
            report(f"pictures are encoded by {path.name}")
            return outcome
        report(f"{path.name} is not used: {outcome}")
    if not paths and text.architecture in HAVE_ENCODER:
        report(f"{gguf.name} is served for text only: there is no mmproj file beside it")
    return None


def _read_projector(path: Path, text: Metadata) -> Projector | str:
    """Returns the encoder in a file, or why it is not one of the model. Raises `ModelError` if it is damaged, and
    `OSError`."""
    from diskprefix.runtime.files.gguf.encoders import encoder_for, projector_type, tensors_of_pictures
    from diskprefix.runtime.files.gguf.metadata import Metadata, shown

    header, tensors = read_tensors([path])
    plain = Metadata(header, tensors)
    kind, width = projector_type(plain), plain.get("vision.projection_dim")
    encoder = encoder_for(text.architecture, kind)
    if encoder is None:
        return f"it has the projector {shown(kind)}, which is not read for {text.architecture}"
    if width != text("embedding_length"):
        return f"it is of a model of width {shown(width)}, and this one has {text('embedding_length')}"
    metadata = Metadata(header, tensors_of_pictures(plain("vision.embedding_length"), tensors))
    return Projector(path=path, encoder=encoder.of_file(metadata), metadata=metadata)
