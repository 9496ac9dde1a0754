"""Images and audio for a multimodal model: read from bytes under limits, and prepared by the model's own processor.
Nothing here opens a path or a URL. Without Pillow, or without the processor's files, a model still takes text."""

from __future__ import annotations

import inspect
import io
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diskprefix.errors import InvalidRequest
from diskprefix.extras.media.sound import Samples, Wav
from diskprefix.model.load.media import MediaKind, MediaPrompt, prepared_bytes
from diskprefix.printable import first_line
from diskprefix.tokens import as_token_ids

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedConfig

MAX_PIXELS = 64 * 1024**2
"""Limit for all images of a request: 256 MiB decoded. A file of a few kilobytes can claim any size."""
MIN_AUDIO_S = 0.1
"""Least length of a sound. The encoders of some models fail for shorter ones."""
MAX_AUDIO_S = 600
"""Limit for all sounds of a request."""
MAX_PREPARED_BYTES = 512 * 1024**2
"""Limit for the tensors that the processor makes of a request's media. One pixel can become 10 MB."""
MAX_ASPECT_RATIO = 200
"""Limit for the longer side of an image divided by the shorter one, as most processors have it. One processor scales a
strip of 1x6000 pixels to gigabytes."""
_IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Pillow reads dozens more, whose decoders are less tested."""
_PLAIN_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class MediaReader:
    """A `MediaProcessor` over the processor that a multimodal model comes with."""

    def __init__(self, processor: Any, problem: str | None = None) -> None:
        self._processor = processor
        self._audio: Any = getattr(processor, "_audio_processor", None)
        self._busy = threading.Lock()
        self.problem = problem
        kinds: dict[MediaKind, Any] = {"image": getattr(processor, "image_processor", None), "audio": self._audio}
        self.kinds = frozenset(kind for kind, part in kinds.items() if part is not None)
        self.placeholders = _placeholders(processor)
        self._longest_s = _longest_s(processor, self._audio)

    @classmethod
    def load(cls, folder: Path, config: PreTrainedConfig, make: Callable[[], Any] | None = None) -> MediaReader:
        """Returns the processor in a model's folder, or the one that `make` returns. If it cannot be used, `problem` says why. Raises only what torch
        raises when memory runs out."""
        from transformers.utils import is_vision_available

        from diskprefix.kv.layout import is_out_of_memory

        try:
            media = cls(_load_processor(folder, config) if make is None else make())
        except Exception as error:  # processors are of any age and author; the model works without
            if is_out_of_memory(error):
                raise
            if not is_vision_available():
                return cls(None, "Pillow is not installed: pip install 'diskprefix[media]'")
            return cls(None, f"its processor cannot be loaded: {first_line(error)}")
        if "audio" in media.kinds and not all(map(find_spec, ("soundfile", "soxr"))):
            return cls(None, "soundfile or soxr is not installed: pip install 'diskprefix[media]'")
        return media

    def read_image(self, content: bytes, *, param: str, beside: Sequence[Image] = ()) -> Image:
        """Returns the first frame of an image file in RGB, turned upright. Raises `InvalidRequest` if `content` is not
        an image, is damaged, has sides that differ too much, or has too many pixels with the images `beside` it."""
        from PIL import Image, ImageOps, UnidentifiedImageError

        try:
            with Image.open(io.BytesIO(content), formats=_IMAGE_FORMATS) as image:
                # Read from the header: nothing is decoded yet.
                sizes = [image.size, *(other.size for other in beside)]
                if sum(width * height for width, height in sizes) > MAX_PIXELS:
                    raise _too_many_pixels(param)
                if max(image.size) > MAX_ASPECT_RATIO * min(image.size):
                    message = f"{param}: the image has {image.width}x{image.height} pixels; one side may be at most "
                    raise InvalidRequest(f"{message}{MAX_ASPECT_RATIO} times as long as the other", param=param)
                return ImageOps.exif_transpose(image).convert("RGB")
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise _too_many_pixels(param) from error
        except (InvalidRequest, MemoryError):
            raise
        except Exception as error:  # decoders of hostile files raise all sorts of errors
            problem = f"{param}: is not an image that can be read ({', '.join(_IMAGE_FORMATS)})"
            if not isinstance(error, UnidentifiedImageError):  # its message holds the address of an object
                problem = f"{problem}: {first_line(error)}"
            raise InvalidRequest(problem, param=param) from error

    def read_audio(self, content: bytes, *, param: str, beside: Sequence[Samples] = ()) -> Samples:
        """Returns a WAV file as mono samples in [-1, 1] at the rate that the model wants, shape [samples]. Raises
        `InvalidRequest`, before anything is decoded, if `content` is not a PCM WAV file or is too short or too long,
        also together with the sounds `beside` it."""
        try:
            sound = Wav(content)
        except ValueError as error:
            raise InvalidRequest(f"{param}: {error}", param=param) from error
        wanted = int(self._audio.sampling_rate)
        seconds, problem = sound.seconds, None
        if seconds < MIN_AUDIO_S:
            problem = f"lasts {seconds:.3f} s, and a sound must last at least {MIN_AUDIO_S} s"
        elif seconds > self._longest_s:
            problem = f"lasts {seconds:.1f} s, and this model takes {self._longest_s:g} s of a sound; send it in parts"
        elif seconds + sum(map(len, beside)) / wanted > MAX_AUDIO_S:
            problem = f"the request holds more than {MAX_AUDIO_S} s of sound"
        if problem is not None:
            raise InvalidRequest(f"{param}: {problem}", param=param)
        return sound.resampled(wanted)

    def prepare(self, text: str, images: Sequence[Image], audio: Sequence[Samples]) -> MediaPrompt:
        """Returns the model's input for a rendered conversation and its media, in the order of their placeholders.
        Raises `InvalidRequest` if the processor refuses them, or if the tensors exceed `MAX_PREPARED_BYTES`."""
        from diskprefix.kv.layout import is_out_of_memory

        bos = self._processor.tokenizer.bos_token
        options = {"add_special_tokens": False} if bos and text.startswith(bos) else {}
        if audio:
            options["sampling_rate"] = self._audio.sampling_rate
        try:
            with self._busy:
                encoded = self._processor(
                    text=text,
                    images=[list(images)] if images else None,
                    audio=list(audio) or None,
                    return_tensors="pt",
                    **options,
                )
        except Exception as error:  # as many ways to fail as there are processors
            if is_out_of_memory(error):
                raise
            raise InvalidRequest(
                f"messages: the model's processor refuses them: {first_line(error)}",
                param="messages",
                code="unsupported_content",
            ) from error
        tensors = dict(encoded)
        token_ids = as_token_ids(tensors.pop("input_ids")[0].numpy())
        if (num_bytes := prepared_bytes(tensors)) > MAX_PREPARED_BYTES:
            raise InvalidRequest(
                f"messages: prepared for the model, the images and sounds take {num_bytes >> 20} MiB, and those of a "
                f"request may take {MAX_PREPARED_BYTES >> 20}; send fewer or smaller ones",
                param="messages",
            )
        return MediaPrompt(token_ids, tensors)


def _placeholders(processor: Any) -> frozenset[str]:
    """Returns the special tokens of the processor and its tokenizer, without those that every tokenizer has."""
    tokenizer = getattr(processor, "tokenizer", None)
    named: dict[str, Any] = dict(getattr(tokenizer, "special_tokens_map", {}))
    plain = {str(named.pop(name)) for name in _PLAIN_TOKENS if name in named}
    of_processor: Iterable[tuple[str, Any]] = vars(processor).items() if processor is not None else ()
    named |= {name: value for name, value in of_processor if name.endswith("_token")}
    texts = {str(value) for value in named.values() if not isinstance(value, list)}
    # Some processors list a line break, or other plain text, as a token.
    return frozenset(text for text in texts - plain if any(not (c.isalnum() or c.isspace()) for c in text))


def _longest_s(processor: Any, extractor: Any) -> float:
    """Returns how many seconds of a sound the feature extractor keeps. It drops the rest without an error."""
    if extractor is None or not callable(extractor):
        return float("inf")
    parameters = inspect.signature(extractor).parameters
    options = {name: parameters[name].default for name in ("truncation", "max_length") if name in parameters}
    kwargs = getattr(processor, "valid_processor_kwargs", None)
    # Older and newer versions of transformers keep a processor's own options in different places.
    options |= getattr(kwargs, "_defaults", {}).get("audio_kwargs", {})
    options |= getattr(processor, "audio_kwargs", {})
    num_samples = options.get("max_length") or getattr(extractor, "n_samples", None)
    if options.get("truncation") is not True or not isinstance(num_samples, int):
        return float("inf")
    return num_samples / int(extractor.sampling_rate)


def _load_processor(folder: Path, config: PreTrainedConfig) -> Any:
    from transformers import AutoProcessor, ProcessorMixin
    from transformers.utils import is_torchvision_available

    try:
        processor = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception:
        if is_torchvision_available():
            raise
        return _load_without_videos(folder, config)
    if not isinstance(processor, ProcessorMixin):
        raise ValueError("the folder has no processor")
    return processor


def _load_without_videos(folder: Path, config: PreTrainedConfig) -> Any:
    """Returns the processor without its part for videos, which is the only one that needs torchvision."""
    from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoTokenizer
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
    from transformers.models.pixtral import image_processing_pil_pixtral

    named = PROCESSOR_MAPPING[type(config)]
    # Pixtral's module takes one function from a module that needs torchvision; this one has it, too.
    sys.modules.setdefault("transformers.models.pixtral.image_processing_pixtral", image_processing_pil_pixtral)
    module: Any = import_module(named.__module__)
    # SmolVLM's writes the number of a video's frames with it.
    module.num2words = str
    wanted = getattr(module, named.__name__)
    loaders = {
        "tokenizer": AutoTokenizer,
        "image_processor": AutoImageProcessor,
        "feature_extractor": AutoFeatureExtractor,
    }

    def check(self: Any, name: str, part: Any) -> Any:
        return None if name == "video_processor" else wanted.check_argument_for_proper_class(self, name, part)

    parts = [
        loaders[name].from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if name != "video_processor"
        else None
        for name in wanted.get_attributes()
    ]
    settings, _ = wanted.get_processor_dict(folder, local_files_only=True)
    lenient: Any = type(wanted.__name__, (wanted,), {"check_argument_for_proper_class": check})
    return lenient.from_args_and_dict(parts, settings)


def _too_many_pixels(param: str) -> InvalidRequest:
    return InvalidRequest(
        f"{param}: the images have more than {MAX_PIXELS // 1024**2} megapixels; send smaller ones", param=param
    )
