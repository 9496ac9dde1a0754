"""Images and sounds as a multimodal model's processor gets them, and text through such a model in steps of the grid."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import DynamicCache

from diskprefix.errors import InvalidRequest, ModelError
from diskprefix.extras.media import media_reader
from diskprefix.extras.media.media_reader import MediaReader
from diskprefix.model.load.loader import LoadedModel, load_model
from diskprefix.model.load.media import prepared_bytes
from diskprefix.settings import Settings
from tests.server.media_models import (
    PARTS_ONLY,
    VISION_MODELS,
    image_bytes,
    wav_bytes,
    write_llava,
    write_qwen2_audio,
)
from tests.traced_memory import traced_peak

RATE = 16000


@pytest.fixture
def reader() -> MediaReader:
    """Over a processor of which only the rate is asked."""
    return MediaReader(SimpleNamespace(image_processor=object(), _audio_processor=SimpleNamespace(sampling_rate=RATE)))


def load(folder: Path) -> LoadedModel:
    return load_model(Settings(model=str(folder)), lambda _: None)


def test_kinds_and_placeholders_are_those_of_the_processors_parts(tmp_path: Path) -> None:
    seeing, hearing = load(write_llava(tmp_path / "llava")).media, load(write_qwen2_audio(tmp_path / "audio")).media
    assert seeing is not None
    assert hearing is not None
    assert (*seeing.kinds, *hearing.kinds) == ("image", "audio")
    assert seeing.problem is hearing.problem is None
    assert seeing.placeholders == {"<image>"}
    assert hearing.placeholders == {"<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"}


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_images_come_in_the_usual_formats(reader: MediaReader, kind: str) -> None:
    image = reader.read_image(image_bytes((200, 30, 30), (40, 30), kind), param="x")
    assert (image.mode, image.size) == ("RGB", (40, 30))
    assert np.abs(np.asarray(image)[29, 39].astype(int) - (200, 30, 30)).max() < 24


@pytest.mark.parametrize("content", [image_bytes(kind="TIFF"), b"hello"], ids=["seldom read", "no image"])
def test_what_is_no_image_of_these_formats_is_refused_without_an_address(reader: MediaReader, content: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"x: is not an image that can be read \(PNG, JPEG, WEBP, GIF, BMP\)$"):
        reader.read_image(content, param="x")


def test_a_photograph_is_turned_upright(reader: MediaReader) -> None:
    file = io.BytesIO()
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (40, 30)).save(file, "JPEG", exif=turned)
    assert reader.read_image(file.getvalue(), param="x").size == (30, 40)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "1", "CMYK"])
def test_every_mode_becomes_red_green_and_blue(reader: MediaReader, mode: str) -> None:
    file = io.BytesIO()
    Image.new(mode, (8, 8)).save(file, "JPEG" if mode == "CMYK" else "PNG")
    assert reader.read_image(file.getvalue(), param="x").mode == "RGB"


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2])
def test_samples_of_any_width_are_between_minus_one_and_one(reader: MediaReader, width: int, channels: int) -> None:
    samples = reader.read_audio(wav_bytes(width=width, channels=channels), param="x")
    expected = np.sin(2 * np.pi * 440 * np.arange(RATE // 2) / RATE) / 2
    assert samples.dtype == np.float32
    assert np.abs(samples - expected).max() < (0.01 if width == 1 else 1e-4)


@pytest.mark.parametrize(
    ("rate", "seconds"), [(22050, 0.5), (44100, 0.5), (48000, 0.5), (8000, 13.25), (11025, 13.25), (44101, 13.25)]
)
def test_a_sound_at_another_rate_is_the_same_sound_also_where_two_steps_of_a_long_one_meet(
    reader: MediaReader, rate: int, seconds: float
) -> None:
    samples = reader.read_audio(wav_bytes(rate=rate, seconds=seconds), param="x")
    expected = np.sin(2 * np.pi * 440 * np.arange(len(samples)) / RATE) / 2
    assert len(samples) == seconds * RATE
    # It begins and ends at once, which no rate can hold.
    assert np.abs(samples - expected)[400:-400].max() < 1e-4


def test_what_the_wanted_rate_cannot_hold_is_left_out_not_folded_down(reader: MediaReader) -> None:
    samples = reader.read_audio(wav_bytes(rate=48000, hertz=12000, seconds=1), param="x")
    assert np.abs(samples)[4000:-4000].max() < 1e-3


def test_a_long_sound_is_read_in_bounded_memory(reader: MediaReader) -> None:
    """Twelve million samples of a byte at a rate whose length no fast transform likes."""
    content = wav_bytes(rate=191_999, width=1, seconds=63, hertz=0)
    assert traced_peak(lambda: reader.read_audio(content, param="x")) < 80e6


def test_a_sound_that_is_too_long_is_refused_before_it_is_decoded(reader: MediaReader) -> None:
    content = wav_bytes(rate=4000, width=1, seconds=2000, hertz=0)

    def read() -> None:
        with pytest.raises(InvalidRequest, match="more than 600 s"):
            reader.read_audio(content, param="x")

    assert traced_peak(read) < 1e6


def with_byte(content: bytes, place: int, value: int) -> bytes:
    return content[:place] + bytes([value]) + content[place + 1 :]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (wav_bytes(seconds=0.09), r"lasts 0\.090 s, and a sound must last at least 0\.1 s"),
        (wav_bytes(seconds=0.5)[:-100], "is cut short: 15944 of 16044 bytes are there"),
        (
            with_byte(wav_bytes(width=4, is_extensible=True), 44, 3),
            "is not a WAV file with PCM samples: its samples are of the format FLOAT",
        ),
    ],
    ids=["short", "cut short", "of floats"],
)
def test_a_sound_that_no_model_takes_is_refused_with_the_reason(
    reader: MediaReader, content: bytes, problem: str
) -> None:
    assert len(reader.read_audio(wav_bytes(seconds=0.1), param="x")) == RATE // 10
    with pytest.raises(InvalidRequest, match=f"x: {problem}"):
        reader.read_audio(content, param="x")


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_the_extensible_header_with_pcm_samples_is_read(reader: MediaReader, width: int) -> None:
    plain, extensible = (wav_bytes(width=width, channels=2, is_extensible=flag) for flag in (False, True))
    assert plain != extensible
    assert np.array_equal(reader.read_audio(extensible, param="x"), reader.read_audio(plain, param="x"))


def test_a_sound_of_which_no_length_is_known_goes_on_to_the_end_of_the_file(reader: MediaReader) -> None:
    content = bytearray(wav_bytes())
    content[40:44] = b"\xff\xff\xff\xff"
    assert np.array_equal(reader.read_audio(bytes(content), param="x"), reader.read_audio(wav_bytes(), param="x"))


def test_damaged_sounds_are_refused_and_nothing_else_is_raised(reader: MediaReader) -> None:
    random = np.random.default_rng(7)
    refused = 0
    for is_extensible in (False, True):
        content = np.frombuffer(wav_bytes(seconds=0.2, is_extensible=is_extensible), np.uint8)
        for _ in range(1500):
            damaged = content[: random.integers(20, len(content))].copy() if random.random() < 0.3 else content.copy()
            places = random.integers(0, min(80, len(damaged)), random.integers(1, 4))
            damaged[places] = random.choice([0, 1, 2, 128, 254, 255], len(places))
            try:
                reader.read_audio(damaged.tobytes(), param="x")
            except InvalidRequest:
                refused += 1
    assert refused > 500


def extractor(**attributes: Any) -> Any:
    """A Whisper-like extractor with its own default for truncation."""

    class Extractor:
        sampling_rate = RATE

        def __call__(self, sounds: Any, truncation: bool = True, max_length: int | None = None) -> None: ...

    made = Extractor()
    vars(made).update(attributes)
    return made


@pytest.mark.parametrize(
    ("processor", "longest_s"),
    [
        ({"_audio_processor": extractor(n_samples=2 * RATE)}, 2),
        ({"_audio_processor": extractor(n_samples=2 * RATE), "audio_kwargs": {"max_length": 3 * RATE}}, 3),
        ({"_audio_processor": extractor(n_samples=2 * RATE), "audio_kwargs": {"truncation": False}}, None),
        ({"_audio_processor": extractor()}, None),
    ],
)
def test_what_the_model_would_cut_off_is_refused(processor: dict[str, Any], longest_s: int | None) -> None:
    reader = MediaReader(SimpleNamespace(**processor))
    if longest_s is None:
        reader.read_audio(wav_bytes(seconds=4), param="x")
        return
    reader.read_audio(wav_bytes(seconds=longest_s), param="x")
    with pytest.raises(InvalidRequest, match=f"x: lasts 4.0 s, and this model takes {longest_s} s of a sound"):
        reader.read_audio(wav_bytes(seconds=4), param="x")


class RunningOut:
    """A processor for which there is no memory."""

    tokenizer = SimpleNamespace(bos_token=None)
    image_processor = object()

    def __call__(self, **_: Any) -> Any:
        raise MemoryError


def test_no_memory_is_not_taken_for_a_refusal(reader: MediaReader, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MemoryError):
        MediaReader(RunningOut()).prepare("x", [], [])

    def run_out(_image: object) -> None:
        raise MemoryError

    monkeypatch.setattr("PIL.ImageOps.exif_transpose", run_out)
    with pytest.raises(MemoryError):
        reader.read_image(image_bytes(), param="x")


def test_what_the_processor_makes_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    media = load(write_llava(tmp_path / "llava")).media
    assert media is not None
    image = Image.new("RGB", (1, 1))
    held = prepared_bytes(media.prepare("<image>", [image], []).tensors)
    assert held >= 28 * 28 * 3 * 4
    monkeypatch.setattr(media_reader, "MAX_PREPARED_BYTES", held)
    media.prepare("<image>", [image], [])
    with pytest.raises(InvalidRequest, match="messages: prepared for the model, the images and sounds take"):
        media.prepare("<image><image>", [image, image], [])


def test_placeholders_are_texts_that_show() -> None:
    assert MediaReader(None, "none").placeholders == frozenset()
    assert MediaReader(SimpleNamespace(image_token="[IMG]", row_token="\n")).placeholders == {"[IMG]"}


def test_sounds_count_together(reader: MediaReader) -> None:
    content = wav_bytes(seconds=301, rate=4000, width=1)
    first = reader.read_audio(content, param="x")
    with pytest.raises(InvalidRequest, match="more than 600 s of sound"):
        reader.read_audio(content, param="x", beside=[first])


@pytest.mark.parametrize(("write", "absent"), [(write_llava, "Pillow"), (write_qwen2_audio, "soundfile or soxr")])
def test_without_the_libraries_a_model_takes_text_and_says_what_to_install(
    write: Callable[[Path], Path],
    absent: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = write(tmp_path / "m")
    if absent == "Pillow":
        (folder / "processor_config.json").unlink()
        monkeypatch.setattr("transformers.utils.is_vision_available", lambda: False)
    else:
        monkeypatch.setattr(media_reader, "find_spec", lambda name: None if name == "soxr" else object())
    media = load(folder).media
    assert media is not None
    assert media.kinds == frozenset()
    assert media.problem == f"{absent} is not installed: pip install 'diskprefix[media]'"
    assert caplog.text.count(f"this model is served for text only: {absent} is not installed") == 1


def test_the_chat_template_may_be_where_processors_have_it(tmp_path: Path) -> None:
    folder = write_llava(tmp_path / "llava")
    (folder / "chat_template.jinja").unlink()
    assert not load(folder).tokenizer.chat_template
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": PARTS_ONLY}))
    assert load(folder).tokenizer.chat_template == PARTS_ONLY


def test_a_multimodal_model_without_its_weights_is_refused(tmp_path: Path) -> None:
    folder = write_llava(tmp_path / "llava")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="holds no weights"):
        load(folder)


@pytest.fixture(scope="module", params=[*VISION_MODELS, "qwen2_audio"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    writers = VISION_MODELS | {"qwen2_audio": write_qwen2_audio}
    return load(writers[request.param](tmp_path_factory.mktemp("models") / "m")).model


@pytest.mark.parametrize("step", [16, 48])
def test_text_in_steps_is_text_in_one_pass(model: Any, step: int) -> None:
    """Positions are right from the second step on, also where the model computes them in three axes."""
    ids = torch.randint(3, 400, (1, 150), generator=torch.Generator().manual_seed(step))
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        whole = model(input_ids=ids).logits[0]
        steps = torch.split(ids, step, dim=1)
        parts = [model(input_ids=part, past_key_values=cache, use_cache=True).logits[0] for part in steps]
    assert torch.allclose(torch.cat(parts), whole, atol=1e-4)
