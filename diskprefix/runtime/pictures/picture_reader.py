"""Pictures for a multimodal model: read from bytes under limits, and prepared by the model's own processor.
Nothing here opens a path or a URL. Without Pillow, or without the processor's files, a model still takes text."""

from __future__ import annotations

import hashlib
import io
import json
import math
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from diskprefix.errors import InvalidRequest
from diskprefix.fair_cache import FairCache
from diskprefix.file_system import file_stamp
from diskprefix.memo import Memo
from diskprefix.prefixstore.kv.layout import is_out_of_memory
from diskprefix.printable import first_line
from diskprefix.runtime.files.gguf.file_processor import lenient_class
from diskprefix.runtime.imports import INSTALL
from diskprefix.runtime.pictures.picture_processor import Detail, PicturesModel
from diskprefix.values import NO_ASKER, Asker, Picture, Tenant
from diskprefix.version import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MAX_PIXELS = 64 * 1024**2
"""Limit for a picture: 256 MiB decoded. A file of a few kilobytes can claim any size. One frame is decoded."""
MAX_REQUEST_PIXELS = 8 * MAX_PIXELS
"""Limit for all pictures of a request: 250 screenshots of 1920x1080."""
MAX_PREPARED_BYTES = 512 * 1024**2
"""Limit for the tensors that the processor makes of a picture. One pixel can become 10 MB."""
MAX_ASPECT_RATIO = 200
"""Limit for the ratio of a picture's sides; most processors have the same. One processor scales a strip of 1x6000
pixels to gigabytes."""
LONGEST_SIDE: Mapping[Detail, int] = {"low": 512, "auto": 2048}
"""A picture is scaled down to fit a square of this side, as in OpenAI's API. With the detail `high`, only the processor
limits the size: Qwen's makes up to 16,384 tokens of a picture, which take minutes, and 4,096 of this square."""
_IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Pillow reads dozens more, whose decoders are less tested."""
_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""Pillow's transposition that turns a picture upright, by the orientation in the file's EXIF data."""
_DECODING_S = 30.0
_WORKER = Path(__file__).with_name("picture_worker.py")
_PLAIN_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TEXT_FIELDS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets")
_POSITION_FIELDS = ("image_grid_thw",)
_KNOWN_SIZES, _KNOWN_PICTURES = 256, 4096
_known = Memo("picture_processors", version=1, max_records=64)


class _Form(NamedTuple):
    """The text and the tokens that the processor puts into a prompt for every picture of a size."""

    text: str
    num_tokens: int
    shape: Mapping[str, Any]


class PictureReader:
    """A `PictureProcessor` for the processor of a multimodal model, which `make` returns when the first picture
    comes: transformers takes seconds to import."""

    def __init__(
        self,
        make: Callable[[], Any] = lambda: None,
        mark: str = "",
        token_id: int = -1,
        placeholders: Iterable[str] = (),
        problem: str | None = None,
    ) -> None:
        self._make = make
        self._busy = threading.Lock()
        self._forms = FairCache[tuple[Tenant, tuple[int, int]], _Form](_KNOWN_SIZES)
        self._problems = FairCache[tuple[Tenant, bytes], str](_KNOWN_PICTURES)
        """Why a picture cannot be decoded, "" if it can, by its name."""
        self.problem, self.mark, self.token_id = problem, mark, token_id
        self.placeholders = frozenset(placeholders)
        self.computed_by: Callable[[], str] = lambda: ""

    @classmethod
    def of(cls, processor: Any, config: Any) -> PictureReader:
        """Returns a reader for a processor."""
        mark, token_id = getattr(processor, "image_token", None), getattr(config, "image_token_id", None)
        has_parts = getattr(processor, "image_processor", None) and getattr(config, "vision_config", True)
        if not has_parts or mark is None or token_id is None:
            return cls(problem="its processor has no placeholder for an image")
        return cls(lambda: processor, mark, int(token_id), _placeholders(processor))

    @classmethod
    def load(cls, model: PicturesModel) -> PictureReader:
        """Returns a reader for a model. If its processor cannot be used, `problem` says why. If it can, and
        the encoder too, what the processor says of itself is remembered. Raises `ModelError` for faults of the encoder,
        and the errors of torch when memory runs out."""
        make = model.make_processor or partial(_load_processor, model.path, model.read_config)
        match _known.get(key := _key_of(model.files)):
            case [str(mark), int(token_id), list(placeholders)]:
                return cls(make, mark, token_id, placeholders)
        if find_spec("torch") is None or find_spec("transformers") is None:
            return cls(problem=f"pictures need what is not installed: {INSTALL}")
        from transformers.utils import is_vision_available

        if (problem := model.problem()) is not None:
            return cls(problem=problem)
        try:
            reader = cls.of(make(), model.read_config())
            if reader.problem is None:
                reader._form((64, 64), "a blank")
        except Exception as error:  # processors are of any age and author; the model works without
            if is_out_of_memory(error):
                raise
            if not is_vision_available():
                return cls(problem="Pillow is not installed: pip install pillow")
            return cls(problem=f"its processor cannot be used: {first_line(error)}")
        if reader.problem is None:
            model.read_encoder()
            _known.put(key, [reader.mark, reader.token_id, sorted(reader.placeholders)])
        return reader

    @cached_property
    def _processor(self) -> Any:
        return self._make()

    @cached_property
    def _settings(self) -> bytes:
        return _settings(self._processor)

    def read_image(
        self, content: bytes, *, detail: Detail, param: str, beside: Sequence[Picture] = (), asker: Asker = NO_ASKER
    ) -> Picture:
        """Returns the first frame of a file, turned upright. Reads only the header. Raises `InvalidRequest` if the file
        is no picture, if its sides differ too much, if it has too many pixels, alone or with those `beside` it, or if
        it could not be decoded before."""
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(io.BytesIO(content), formats=_IMAGE_FORMATS) as image:
                # Not `image.getexif()`, which decodes a PNG file.
                turn = _TURNS.get(Image.Image.getexif(image).get(0x0112, 1))
                # Pillow calls a JPEG file with several photographs MPO, and opens it only as JPEG.
                size, kind = image.size, "JPEG" if image.format == "MPO" else image.format
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise _too_many_pixels("the image has", MAX_PIXELS, param) from error
        except MemoryError:
            raise
        except Exception as error:  # hostile files lead to all sorts of errors
            problem = f"{param}: is not an image that can be read ({', '.join(_IMAGE_FORMATS)})"
            if not isinstance(error, UnidentifiedImageError):  # its message holds the address of an object
                problem = f"{problem}: {first_line(error)}"
            raise InvalidRequest(problem, param=param) from error
        if math.prod(size) > MAX_PIXELS:
            raise _too_many_pixels("the image has", MAX_PIXELS, param)
        if math.prod(size) + sum(math.prod(map(int, other.size.split("x"))) for other in beside) > MAX_REQUEST_PIXELS:
            raise _too_many_pixels("the images of the request have", MAX_REQUEST_PIXELS, param)
        if max(size) > MAX_ASPECT_RATIO * min(size):
            message = f"{param}: the image has {size[0]}x{size[1]} pixels; one side may be at most "
            raise InvalidRequest(f"{message}{MAX_ASPECT_RATIO} times as long as the other", param=param)
        width, height = reversed(size) if turn is not None and turn in (2, 4, 5, 6) else size
        scale = min(1.0, LONGEST_SIDE.get(detail, max(size)) / max(size))
        target_size = (max(1, round(width * scale)), max(1, round(height * scale)))
        form = self._form(target_size, param, asker)
        with self._busy:
            form_text = self.computed_by() + json.dumps(target_size)
        name = hashlib.blake2b(self._settings + form_text.encode() + content, digest_size=16).digest()
        if earlier := self._problems.get((asker.tenant, name)):
            raise InvalidRequest.at(param, earlier)
        prepare = partial(self._prepare, content, (kind, turn, size, target_size), param, name, asker)
        return Picture(name, *form, f"{width}x{height}", len(content), param, prepare)

    def _form(self, size: tuple[int, int], param: str, asker: Asker = NO_ASKER) -> _Form:
        """Returns the form of pictures of this size, from a blank one: only the pixels differ. It takes up to a second
        and is kept for the tenant of `asker` alone. Raises `InvalidRequest`."""
        from PIL import Image

        if (form := self._forms.get((asker.tenant, size))) is not None:
            return form
        made = self._process(Image.new("RGB", size), param)
        if (num_bytes := sum(getattr(value, "nbytes", 0) for value in made.values())) > MAX_PREPARED_BYTES:
            problem = f"prepared for the model, it takes {num_bytes >> 20} MiB of at most {MAX_PREPARED_BYTES >> 20}"
            raise InvalidRequest(f"{param}: {problem}; send a smaller one", param=param)
        text = made["text_replacement_offsets"][0][0]["replacement"]
        num_tokens = int((made["input_ids"] == self.token_id).sum())
        form = _Form(text, num_tokens, {name: made[name] for name in _POSITION_FIELDS if name in made})
        self._forms.put((asker.tenant, size), form, asker.share)
        return form

    def _process(self, image: Any, param: str) -> dict[str, Any]:
        """Returns the processor's result for a text that is only a picture. Raises `InvalidRequest`."""
        options: dict[str, Any] = {"return_tensors": "pt", "return_text_replacement_offsets": True}
        try:
            # Its tokenizer is not safe to call from several threads.
            with self._busy:
                return dict(self._processor(text=self.mark, images=[[image]], **options))
        except Exception as error:  # as many ways to fail as there are processors
            if is_out_of_memory(error):
                raise
            problem = f"{param}: the model's processor refuses it: {first_line(error)}"
            raise InvalidRequest(problem, param=param, code="unsupported_content") from error

    def can_decode(self, picture: Picture, asker: Asker) -> bool:
        """Returns whether a picture can be decoded. Decodes it, unless that was done for this tenant before."""
        if (problem := self._problems.get((asker.tenant, picture.name))) is not None:
            return not problem
        try:
            picture.prepare()
        except InvalidRequest:
            return False
        return True

    def _prepare(
        self, content: bytes, arguments: tuple[Any, ...], param: str, name: bytes, asker: Asker
    ) -> dict[str, Any]:
        key, share = (asker.tenant, name), asker.share
        try:
            made = self._process(_decode(content, arguments, param), param)
        except _DecoderEnded:
            # Perhaps the machine was busy: the next request tries again.
            raise
        except InvalidRequest as error:
            self._problems.put(key, error.message.removeprefix(f"{param}: "), share)
            raise
        self._problems.put(key, "", share)
        return {name: tensor for name, tensor in made.items() if name not in _TEXT_FIELDS}


class _DecoderEnded(InvalidRequest):
    """The decoder was slow, or killed by another process or for want of memory: that need not be the file's fault."""


def _decode(content: bytes, arguments: tuple[Any, ...], param: str) -> Any:
    """Decodes a file in a process of its own, and returns the picture. `arguments` are those of `picture_worker.main`
    after the folder. Raises `InvalidRequest` if the process fails, crashes, or exceeds its limits of time and
    memory; `_DecoderEnded` if it was slow or killed."""
    import PIL.Image

    command = [sys.executable, "-I", "-S", str(_WORKER), str(Path(PIL.__file__).parents[1]), json.dumps(arguments)]
    try:
        done = subprocess.run(command, input=content, capture_output=True, timeout=_DECODING_S, check=False)
        # The last line of a traceback, without the name of the error's class.
        problem = done.stderr.decode(errors="replace").strip().rpartition("\n")[2].partition(": ")[2][:300]
        if done.returncode == 0:
            return PIL.Image.frombytes("RGB", arguments[-1], done.stdout)
        was_ended = done.returncode == -signal.SIGKILL
    except ValueError:
        problem, was_ended = "", False
    except subprocess.TimeoutExpired:
        problem, was_ended = "", True
    problem = problem or "its decoder crashes, or takes too much time or memory"
    raise (_DecoderEnded if was_ended else InvalidRequest)(f"{param}: cannot be decoded: {problem}", param=param)


def _key_of(files: Iterable[Path]) -> str:
    """Returns a key that changes with the files of a model and with the versions of the packages that read them."""
    versions = [*map(_installed, ("transformers", "pillow", "torchvision"))]
    text = json.dumps([__version__, versions, [[str(file.absolute()), *file_stamp(file)] for file in files]])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _settings(processor: Any) -> bytes:
    """Returns a digest of everything that changes the prepared tensors of a file, except the target size: settings,
    versions, and the program that decodes it."""
    if not hasattr(processor, "to_dict"):
        return b""
    backend = type(getattr(processor, "image_processor", None)).__name__
    versions = [getattr(sys.modules.get(name), "__version__", "") for name in ("PIL", "transformers", "torchvision")]
    text = json.dumps([processor.to_dict(), backend, versions, _WORKER.read_text()], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode()).digest()


def _placeholders(processor: Any) -> frozenset[str]:
    """Returns the special tokens of the processor and its tokenizer, except those that every tokenizer has."""
    tokenizer = getattr(processor, "tokenizer", None)
    named: dict[str, Any] = dict(getattr(tokenizer, "special_tokens_map", {}))
    plain = {str(named.pop(name)) for name in _PLAIN_TOKENS if name in named}
    of_processor: Iterable[tuple[str, Any]] = vars(processor).items() if processor is not None else ()
    named |= {name: value for name, value in of_processor if name.endswith("_token")}
    texts = {str(value) for value in named.values() if not isinstance(value, list)}
    # Some processors list a line break or other plain text as a token.
    return frozenset(text for text in texts - plain if any(not (c.isalnum() or c.isspace()) for c in text))


def _load_processor(folder: Path, read_config: Callable[[], PreTrainedConfig]) -> Any:
    from transformers import AutoProcessor, ProcessorMixin

    try:
        processor = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception:  # noqa: BLE001 (the part for videos may be missing, or what that part needs)
        return _load_without_videos(folder, read_config())
    if not isinstance(processor, ProcessorMixin):
        raise ValueError("the folder has no processor")
    return processor


def _load_without_videos(folder: Path, config: PreTrainedConfig) -> Any:
    """Returns the processor without its part for videos, often the only part that needs torchvision."""
    from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoTokenizer
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    lenient = lenient_class(PROCESSOR_MAPPING[type(config)])
    loaders = {
        "tokenizer": AutoTokenizer,
        "image_processor": AutoImageProcessor,
        "feature_extractor": AutoFeatureExtractor,
    }
    parts = [
        loaders[name].from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if name != "video_processor"
        else None
        for name in lenient.get_attributes()
    ]
    settings, _ = lenient.get_processor_dict(folder, local_files_only=True)
    return lenient.from_args_and_dict(parts, settings)


def _too_many_pixels(what: str, most: int, param: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: {what} more than {most >> 20} megapixels; send smaller ones", param=param)
