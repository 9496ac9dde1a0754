"""Processors of pictures without parts for videos and sounds, and the processor that an `mmproj` file describes."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from diskprefix.runtime.files.folder_tokenizer import copy_for_transformers

if TYPE_CHECKING:
    from transformers import ProcessorMixin

    from diskprefix.runtime.files.gguf.encoders import PictureSettings
    from diskprefix.runtime.files.tokenizer import Tokenizer


def lenient_class(named: Any) -> Any:
    """Returns a class of processors that accepts None for parts, because parts for videos often need torchvision.
    `named` is transformers' class, or its placeholder without torchvision."""
    from transformers.models.pixtral import image_processing_pil_pixtral

    if find_spec("torchvision") is None:
        # Pixtral's module imports a function from a module that needs torchvision. This module has it, too.
        sys.modules.setdefault("transformers.models.pixtral.image_processing_pixtral", image_processing_pil_pixtral)
    module: Any = import_module(named.__module__)
    # SmolVLM's module writes the number of a video's frames with it.
    module.num2words = str
    wanted = getattr(module, named.__name__)

    def check(self: Any, name: str, part: Any) -> Any:
        return None if part is None else wanted.check_argument_for_proper_class(self, name, part)

    return type(wanted.__name__, (wanted,), {"check_argument_for_proper_class": check})


def make_processor(pictures: PictureSettings, tokenizer: Tokenizer) -> ProcessorMixin:
    """Returns transformers' processor, with a copy of the model's tokenizer. Raises what its parts raise."""
    import transformers

    image_class, named = (getattr(transformers, name) for name in pictures.processors)
    lenient = lenient_class(named)
    own = copy_for_transformers(tokenizer)
    own._set_model_specific_special_tokens(dict(pictures.tokens))
    parts = {"tokenizer": own, "image_processor": image_class(**pictures.images)}
    parts |= dict.fromkeys(lenient.get_attributes() - parts.keys())
    processor: ProcessorMixin = lenient(**parts, **pictures.settings)
    return processor
