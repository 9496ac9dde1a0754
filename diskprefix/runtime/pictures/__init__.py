"""Images for multimodal models."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diskprefix.runtime.pictures.picture_processor import PictureProcessor, PicturesModel


def open_pictures(model: PicturesModel) -> PictureProcessor:
    """Returns the reader of a model's pictures."""
    from diskprefix.runtime.pictures.picture_reader import PictureReader

    return PictureReader.load(model)
