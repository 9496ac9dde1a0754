"""Images for multimodal models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from diskprefix.model.load.picture_processor import PictureProcessor


def open_pictures(
    folder: Path, config: PreTrainedConfig, problem: str | None, make_processor: Callable[[], Any] | None = None
) -> PictureProcessor:
    """Returns what reads the pictures of a model. With a `problem`, it takes none."""
    from diskprefix.extras.pictures.picture_reader import PictureReader

    return (
        PictureReader.load(folder, config, make_processor) if problem is None else PictureReader(None, problem=problem)
    )
