"""Images and sounds for multimodal models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from diskprefix.model.load.media import MediaProcessor


def open_media(
    folder: Path, config: PreTrainedConfig, problem: str | None, make_processor: Callable[[], Any] | None = None
) -> MediaProcessor:
    """Returns what reads the media of a model. With a `problem`, it takes none."""
    from diskprefix.extras.media.media_reader import MediaReader

    return MediaReader.load(folder, config, make_processor) if problem is None else MediaReader(None, problem=problem)
