"""Images and audio for a multimodal model: read from bytes under limits, and prepared by the model's own processor.

Nothing here opens a path or a URL: what a request shows the model comes with the request. The library that reads images
is optional (`pip install 'diskprefix[media]'`); without it, or without the processor's files, a model still takes text.
"""

from __future__ import annotations

import io
import threading
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from diskprefix.engine.gguf import first_line
from diskprefix.errors import InvalidRequest
from diskprefix.tokens import TokenIds, as_token_ids

if TYPE_CHECKING:
    import numpy.typing as npt
    from PIL.Image import Image
    from transformers import PreTrainedConfig

MediaKind: TypeAlias = Literal["image", "audio"]
Samples: TypeAlias = "npt.NDArray[np.float32]"

MAX_PIXELS = 64 * 1024**2
"""Of all images of a request: 192 MiB decoded. A file of a few kilobytes can claim any size."""
MAX_AUDIO_S = 600
"""Of all sounds of a request."""
_SAMPLE_RATES = range(4000, 192_001)
_IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Of the dozens that the library reads: what clients send, in decoders that many eyes have seen."""
_SAMPLE_TYPES = {1: "u1", 2: "<i2", 3: "<i4", 4: "<i4"}
"""numpy's type by the bytes of a sample; those of three are padded to four."""


@dataclass(frozen=True, eq=False)
class MediaPrompt:
    """`token_ids` with the placeholders of the media in them; `tensors` by the name under which the model takes them,
    on the CPU."""

    token_ids: TokenIds
    tensors: dict[str, Any]


class MediaProcessor:
    """A multimodal model's own processor. Safe to call from several threads.

    `kinds` are those that the model takes. `problem` says why it takes none, if it could.
    """

    def __init__(self, processor: Any, problem: str | None = None) -> None:
        self._processor = processor
        self._audio: Any = getattr(processor, "_audio_processor", None)
        self._busy = threading.Lock()
        self.problem = problem
        kinds: dict[MediaKind, Any] = {"image": getattr(processor, "image_processor", None), "audio": self._audio}
        self.kinds = frozenset(kind for kind, part in kinds.items() if part is not None)

    @classmethod
    def load(cls, folder: Path, config: PreTrainedConfig) -> MediaProcessor:
        """The processor in a model's folder. What keeps it from being used becomes `problem`.

        Raises only what running out of memory raises.
        """
        from diskprefix.kv.layout import is_out_of_memory

        try:
            return cls(_load_processor(folder, config))
        except Exception as error:  # processors are of any age and author; the model works without
            if is_out_of_memory(error):
                raise
            return cls(None, _problem(error))

    def read_image(self, content: bytes, *, param: str, beside: Sequence[Image] = ()) -> Image:
        """An image file (PNG, JPEG, WebP, GIF, BMP; the first frame) in RGB, turned upright.

        Raises `InvalidRequest` for what is no image, is damaged, or makes more than `MAX_PIXELS` pixels with the images
        `beside` it.
        """
        from PIL import Image, ImageOps

        try:
            with Image.open(io.BytesIO(content), formats=_IMAGE_FORMATS) as image:
                # Read from the header: nothing is decoded yet.
                sizes = [image.size, *(other.size for other in beside)]
                if sum(width * height for width, height in sizes) > MAX_PIXELS:
                    raise _too_many_pixels(param)
                return ImageOps.exif_transpose(image).convert("RGB")
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise _too_many_pixels(param) from error
        except InvalidRequest:
            raise
        except Exception as error:  # decoders of hostile files raise all sorts of errors
            raise InvalidRequest(
                f"{param}: is no image that can be read ({', '.join(_IMAGE_FORMATS)}): {first_line(error)}", param=param
            ) from error

    def read_audio(self, content: bytes, *, param: str, beside: Sequence[Samples] = ()) -> Samples:
        """A WAV file as mono samples in [-1, 1] at the rate that the model wants, shape [samples].

        Raises `InvalidRequest` for what is no PCM WAV file, or lasts more than `MAX_AUDIO_S` seconds with the sounds
        `beside` it.
        """
        try:
            with wave.open(io.BytesIO(content)) as file:
                channels, width, rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
                frames = file.readframes(file.getnframes())
        except (wave.Error, EOFError, ValueError) as error:
            raise InvalidRequest(
                f"{param}: is no WAV file with PCM samples: {first_line(error) or 'it is cut short'}", param=param
            ) from error
        if rate not in _SAMPLE_RATES:
            raise InvalidRequest(
                f"{param}: {rate} samples a second are out of range ({_SAMPLE_RATES[0]} to {_SAMPLE_RATES[-1]})",
                param=param,
            )
        if width not in _SAMPLE_TYPES:
            raise InvalidRequest(f"{param}: has {8 * width}-bit samples; 8, 16, 24 and 32 are read", param=param)
        samples = _mono(frames, channels, width)
        if not len(samples):
            raise InvalidRequest(f"{param}: holds no sound", param=param)
        wanted = int(self._audio.sampling_rate)
        if len(samples) / rate + sum(map(len, beside)) / wanted > MAX_AUDIO_S:
            raise InvalidRequest(f"{param}: the request holds more than {MAX_AUDIO_S} s of sound", param=param)
        return _resampled(samples, rate, wanted)

    def prepare(self, text: str, images: Sequence[Image], audio: Sequence[Samples]) -> MediaPrompt:
        """A rendered conversation and its media, in the order of their placeholders in the text, as the model's input.

        Raises `InvalidRequest` where the processor refuses them.
        """
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
            raise InvalidRequest(
                f"messages: the model's processor refuses them: {first_line(error)}",
                param="messages",
                code="unsupported_content",
            ) from error
        tensors = dict(encoded)
        return MediaPrompt(as_token_ids(tensors.pop("input_ids")[0].numpy()), tensors)


def _load_processor(folder: Path, config: PreTrainedConfig) -> Any:
    """Raises whatever transformers raises."""
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
    """The processor without its part for videos, the only one that cannot do without torchvision."""
    from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoTokenizer
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    wanted = PROCESSOR_MAPPING[type(config)]
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


def _problem(error: Exception) -> str:
    from transformers.utils import is_vision_available

    if not is_vision_available():
        return "Pillow is not installed: pip install 'diskprefix[media]'"
    return f"its processor cannot be loaded: {first_line(error)}"


def _too_many_pixels(param: str) -> InvalidRequest:
    return InvalidRequest(
        f"{param}: the images have more than {MAX_PIXELS // 1024**2} megapixels; send smaller ones", param=param
    )


def _mono(frames: bytes, channels: int, width: int) -> Samples:
    """PCM frames as the mean of their channels in [-1, 1]."""
    frames = frames[: len(frames) // (channels * width) * channels * width]
    if width == 3:
        # The low byte of four: the same sample, 256 times as large.
        padded = np.zeros((len(frames) // 3, 4), np.uint8)
        padded[:, 1:] = np.frombuffer(frames, np.uint8).reshape(-1, 3)
        frames, width = padded.tobytes(), 4
    samples = np.frombuffer(frames, np.dtype(_SAMPLE_TYPES[width])).reshape(-1, channels).mean(axis=1, dtype=np.float32)
    # Samples of one byte are unsigned, all others signed.
    scaled: Samples = samples / np.float32(2 ** (8 * width - 1)) - np.float32(width == 1)
    return scaled


def _resampled(samples: Samples, rate: int, wanted: int) -> Samples:
    """The same sound at another rate: its spectrum, cut or filled up, and turned back."""
    if rate == wanted:
        return samples
    num_samples = max(1, round(len(samples) * wanted / rate))
    spectrum = np.fft.rfft(samples)
    return (np.fft.irfft(spectrum[: num_samples // 2 + 1], num_samples) * (num_samples / len(samples))).astype(
        np.float32
    )
