"""Pictures and sounds as a multimodal model's processor gets them, and text through such a model in steps."""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from transformers import DynamicCache

from diskprefix.errors import InvalidRequest, ModelError
from diskprefix.extras.media import media_reader
from diskprefix.extras.media.media_reader import MediaReader
from diskprefix.extras.media.sound import Wav
from diskprefix.model.load.loader import LoadedModel, load_model
from diskprefix.nouns import Medium
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
ORIENTATION = 0x0112


class Plain:
    """A processor that hands on what it gets: four tokens a medium."""

    tokenizer = SimpleNamespace()
    image_processor = object()
    image_token = "<image>"
    audio_token = "<audio>"
    _audio_processor = SimpleNamespace(sampling_rate=RATE)

    def __call__(self, text: str, images: Any = None, audio: Any = None, **_: Any) -> dict[str, Any]:
        pixels = {"pixel_values": np.array(images[0][0])} if images else {"input_features": audio[0]}
        offsets = [[{"replacement": text * 4}]]
        return {"input_ids": np.array([[7] * 4]), "text_replacement_offsets": offsets, **pixels}


CONFIG = SimpleNamespace(image_token_id=7, audio_token_id=7)


@pytest.fixture
def reader() -> MediaReader:
    return MediaReader(Plain(), CONFIG)


def load(folder: Path) -> LoadedModel:
    return load_model(Settings(model=str(folder)), lambda _: None)


def read(reader: MediaReader, content: bytes, detail: Any = "auto", beside: Any = ()) -> Medium:
    return reader.read_image(content, detail=detail, param="x", beside=beside)


def pixels(reader: MediaReader, content: bytes) -> Any:
    """Returns what the processor gets of a picture: [height, width, 3]."""
    return read(reader, content).prepare()["pixel_values"].astype(int)


def samples(reader: MediaReader, content: bytes) -> Any:
    return reader.read_audio(content, param="x").prepare()["input_features"]


def test_a_medium_can_be_prepared_again(reader: MediaReader) -> None:
    picture, sound = read(reader, image_bytes()), reader.read_audio(wav_bytes(), param="x")
    assert np.array_equal(*(picture.prepare()["pixel_values"] for _ in range(2)))
    assert np.array_equal(*(sound.prepare()["input_features"] for _ in range(2)))


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def test_kinds_and_placeholders_are_those_of_the_processors_parts(tmp_path: Path) -> None:
    seeing, hearing = load(write_llava(tmp_path / "llava")).media, load(write_qwen2_audio(tmp_path / "audio")).media
    assert seeing is not None
    assert hearing is not None
    assert (*seeing.kinds, *hearing.kinds) == ("image", "audio")
    assert seeing.problem is hearing.problem is None
    assert seeing.placeholders == {"<image>"}
    assert hearing.placeholders == {"<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"}


@pytest.fixture(scope="module", params=[*VISION_MODELS, "qwen2_audio"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    writers = VISION_MODELS | {"qwen2_audio": write_qwen2_audio}
    return load(writers[request.param](tmp_path_factory.mktemp("models") / "m"))


@pytest.mark.parametrize("size", [(90, 50), (31, 64), (24, 500)])
def test_a_medium_is_what_the_models_own_processor_makes_of_it(loaded: LoadedModel, size: tuple[int, int]) -> None:
    """Its text in the place of the mark gives the processor's tokens, and its tensors are the processor's: found from
    the header alone, and as many tokens as the encoder has rows."""
    media = loaded.media
    assert isinstance(media, MediaReader)
    (kind,) = media.kinds
    if kind == "image":
        content = image_bytes(size=size)
        given: dict[str, Any] = {"images": [[Image.open(io.BytesIO(content))]]}
        medium = read(media, content)
    else:
        content = wav_bytes(seconds=size[0] / 50)
        medium = media.read_audio(content, param="x")
        given = {"audio": [Wav(content).resampled(RATE)], "sampling_rate": RATE}
    text = f"Look:\n{media.marks[kind]}\nWell?"
    expected = dict(media._processor(text=text, return_tensors="pt", **given))
    tokens = media._processor.tokenizer(text.replace(media.marks[kind], medium.text))["input_ids"]
    assert tokens == expected["input_ids"][0].tolist()
    assert tokens.count(media.token_ids[kind]) == medium.num_tokens > 0
    prepared = medium.prepare()
    assert prepared.keys() == {name for name in expected if "pixel" in name or name in prepared}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in prepared.items())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in medium.shape.items())
    assert ("image_grid_thw" in medium.shape) == ("image_grid_thw" in expected)
    if kind == "image":
        with torch.inference_mode():
            rows = loaded.model.get_image_features(**prepared).pooler_output
        rows = (
            torch.cat([row.flatten(0, -2) for row in rows]) if isinstance(rows, list | tuple) else rows.flatten(0, -2)
        )
        assert len(rows) == medium.num_tokens


def test_a_name_is_that_of_the_bytes_of_what_is_asked_and_of_the_processor(reader: MediaReader) -> None:
    content, large = image_bytes(), image_bytes(size=(900, 600))
    assert read(reader, content).name == read(reader, content).name == read(reader, content, "low").name
    settings = SimpleNamespace(to_dict=lambda: {"size": 1})
    other = MediaReader(settings, CONFIG)
    assert reader._settings != other._settings != MediaReader(SimpleNamespace(to_dict=dict), CONFIG)._settings
    names = [read(reader, one, detail).name for one in (content, image_bytes((1, 2, 3)), large) for detail in ("low",)]
    assert len({*names, read(reader, large).name}) == 4
    assert all(len(name) == 16 for name in names)


@pytest.mark.parametrize(
    ("detail", "size", "expected"),
    [
        ("low", (1920, 1080), (512, 288)),
        ("low", (100, 60), (100, 60)),
        ("auto", (1920, 1080), (1920, 1080)),
        ("auto", (3840, 2160), (2048, 1152)),
        ("high", (3840, 2160), (3840, 2160)),
    ],
)
def test_the_detail_bounds_what_the_processor_gets(
    reader: MediaReader, detail: str, size: tuple[int, int], expected: tuple[int, int]
) -> None:
    medium = read(reader, saved(Image.new("L", size)), detail)
    assert medium.size == f"{size[0]}x{size[1]}"
    assert medium.prepare()["pixel_values"].shape == (expected[1], expected[0], 3)


def test_a_known_size_costs_the_processor_nothing(reader: MediaReader, monkeypatch: pytest.MonkeyPatch) -> None:
    first = read(reader, image_bytes((1, 2, 3)))
    monkeypatch.setattr(Plain, "__call__", None)
    second = read(reader, image_bytes((3, 2, 1)))
    assert (second.text, second.num_tokens) == (first.text, first.num_tokens) == ("<image>" * 4, 4)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_images_come_in_the_usual_formats(reader: MediaReader, kind: str) -> None:
    image = pixels(reader, image_bytes((200, 30, 30), (40, 30), kind))
    assert image.shape == (30, 40, 3)
    assert np.abs(image[29, 39] - (200, 30, 30)).max() < 24


@pytest.mark.parametrize("content", [image_bytes(kind="TIFF"), b"hello", b""], ids=["seldom read", "no image", "empty"])
def test_what_is_no_image_of_these_formats_is_refused_without_an_address(reader: MediaReader, content: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"x: is not an image that can be read \(PNG, JPEG, WEBP, GIF, BMP\)$"):
        read(reader, content)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photograph_is_turned_upright(reader: MediaReader, orientation: int) -> None:
    image, turned = Image.open(io.BytesIO(image_bytes())), Image.Exif()
    turned[ORIENTATION] = orientation
    content = saved(image, exif=turned)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    assert read(reader, content).size == f"{expected.width}x{expected.height}"
    assert np.array_equal(pixels(reader, content), np.asarray(expected))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "1", "CMYK", "L"])
def test_every_mode_becomes_red_green_and_blue(reader: MediaReader, mode: str) -> None:
    assert pixels(reader, saved(Image.new(mode, (8, 8)), "JPEG" if mode == "CMYK" else "PNG")).shape == (8, 8, 3)


def test_what_can_be_seen_through_is_white(reader: MediaReader) -> None:
    clear = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    palette = Image.new("P", (4, 4), 0)
    for content in (saved(clear), saved(clear, "WEBP", lossless=True), saved(palette, transparency=0)):
        assert (pixels(reader, content) == 255).all()
    half = Image.new("RGBA", (4, 4), (255, 0, 0, 128))
    assert pixels(reader, saved(half))[0, 0].tolist() == [255, 127, 127]


def test_sixteen_bits_of_grey_keep_their_shades(reader: MediaReader) -> None:
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    assert np.array_equal(pixels(reader, saved(Image.fromarray(ramp)))[:, 0, 0], np.arange(256))


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_an_animation_is_taken(reader: MediaReader, kind: str) -> None:
    frames = [Image.new("RGB", (40, 30), (shade, 0, 0)) for shade in (250, 0, 120)]
    first, *others = frames
    image = pixels(reader, saved(first, kind, save_all=True, append_images=others))
    assert image.shape == (30, 40, 3)
    assert np.abs(image - (250, 0, 0)).max() < 24


def png_of(width: int, height: int) -> bytes:
    """A picture of these sides with the pixels of another one."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    content = image_bytes()
    return content[:12] + header + struct.pack(">I", zlib.crc32(header)) + content[33:]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (png_of(9000, 9000), "an image may have at most 64 megapixels, and those of a request 512"),
        (png_of(60000, 60000), "is not an image that can be read.*exceeds limit of .* pixels"),
        (png_of(1, 6000), "the image has 1x6000 pixels; one side may be at most 200 times as long as the other"),
        (png_of(0, 6), "is not an image that can be read"),
    ],
)
def test_a_picture_with_impossible_sides_is_refused_before_it_is_decoded(
    reader: MediaReader, content: bytes, problem: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"x: {problem}"):
        read(reader, content)


def test_pixels_count_together(reader: MediaReader) -> None:
    screenshots: list[Medium] = []
    for number in range(200):
        screenshots.append(read(reader, png_of(1920 - number % 2, 1080), beside=screenshots))
    with pytest.raises(InvalidRequest, match="x: an image may have at most 64 megapixels, and those of a request 512"):
        read(reader, png_of(8000, 8000), beside=[*screenshots, read(reader, png_of(8000, 8000))])


def test_many_frames_cost_nothing(reader: MediaReader) -> None:
    first, *others = [Image.new("P", (1000, 1000), shade) for shade in range(40)]
    content = saved(first, "GIF", save_all=True, append_images=others)
    assert len(content) < 1e6, "forty megapixels"
    assert pixels(reader, content).shape == (1000, 1000, 3)


def cuts() -> list[Any]:
    return [
        pytest.param(image_bytes(kind=kind, size=(64, 64))[:-cut], id=f"{kind} less {cut}")
        for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP")
        for cut in (40, 100)
    ]


@pytest.mark.parametrize("content", cuts())
def test_a_truncated_file_is_refused_and_the_reason_said(reader: MediaReader, content: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"x: (cannot be decoded|is not an image that can be read)"):
        read(reader, content).prepare()


def mutated(count: int) -> Iterator[bytes]:
    random = np.random.default_rng(11)
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
        content = np.frombuffer(image_bytes(kind=kind, size=(64, 48)), np.uint8)
        for _ in range(count):
            damaged = content[: random.integers(8, len(content))].copy() if random.random() < 0.3 else content.copy()
            places = random.integers(4, len(damaged), random.integers(1, 6))
            damaged[places] = random.choice([0, 1, 2, 127, 128, 254, 255], len(places))
            yield damaged.tobytes()


def test_of_damaged_pictures_nothing_but_a_refusal_is_raised_by_the_header(reader: MediaReader) -> None:
    refused = 0
    for content in mutated(200):
        try:
            read(reader, content)
        except InvalidRequest:
            refused += 1
    assert refused > 100


@pytest.mark.slow
def test_of_damaged_pictures_nothing_but_a_refusal_is_raised_by_the_decoder(reader: MediaReader) -> None:
    refused = 0
    for content in mutated(80):
        try:
            read(reader, content).prepare()
        except InvalidRequest:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("import time; time.sleep(60)", "its decoder crashes, or takes too much time or memory"),
        ("import os; os.abort()", "its decoder crashes, or takes too much time or memory"),
        ("pass", "its decoder crashes, or takes too much time or memory"),
        ("raise OSError('the end came early')", "the end came early"),
    ],
    ids=["hangs", "crashes", "says nothing", "fails"],
)
def test_a_decoder_that_does_not_answer_is_ended(
    reader: MediaReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, problem: str
) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(program)
    monkeypatch.setattr(media_reader, "_WORKER", worker)
    monkeypatch.setattr(media_reader, "_DECODING_S", 0.5 if "sleep" in program else 30)
    with pytest.raises(InvalidRequest, match=f"^x: cannot be decoded: {problem}$"):
        read(reader, image_bytes()).prepare()


@pytest.mark.slow
def test_a_decoder_may_take_no_more_memory_than_its_limit() -> None:
    """The largest picture that is accepted fits, with transparency and a turn."""
    content = saved(Image.new("RGBA", (8192, 8192)), compress_level=1)
    asked = ("PNG", 4, (8192, 8192), (512, 512))
    assert media_reader._decoded(content, asked, "x").size == (512, 512)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2])
def test_samples_of_any_width_are_between_minus_one_and_one(reader: MediaReader, width: int, channels: int) -> None:
    found = samples(reader, wav_bytes(width=width, channels=channels))
    expected = np.sin(2 * np.pi * 440 * np.arange(RATE // 2) / RATE) / 2
    assert found.dtype == np.float32
    assert np.abs(found - expected).max() < (0.01 if width == 1 else 1e-4)


@pytest.mark.parametrize(
    ("rate", "seconds"), [(22050, 0.5), (44100, 0.5), (48000, 0.5), (8000, 13.25), (11025, 13.25), (44101, 13.25)]
)
def test_a_sound_at_another_rate_is_the_same_sound_also_where_two_steps_of_a_long_one_meet(
    reader: MediaReader, rate: int, seconds: float
) -> None:
    found = samples(reader, wav_bytes(rate=rate, seconds=seconds))
    expected = np.sin(2 * np.pi * 440 * np.arange(len(found)) / RATE) / 2
    assert len(found) == seconds * RATE
    # It begins and ends at once, which no rate can hold.
    assert np.abs(found - expected)[400:-400].max() < 1e-4


def test_what_the_wanted_rate_cannot_hold_is_left_out_not_folded_down(reader: MediaReader) -> None:
    found = samples(reader, wav_bytes(rate=48000, hertz=12000, seconds=1))
    assert np.abs(found)[4000:-4000].max() < 1e-3


def test_a_long_sound_is_read_in_bounded_memory(reader: MediaReader) -> None:
    """Twelve million samples of a byte at a rate whose length no fast transform likes."""
    content = wav_bytes(rate=191_999, width=1, seconds=63, hertz=0)
    assert traced_peak(lambda: samples(reader, content)) < 80e6


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
    assert len(samples(reader, wav_bytes(seconds=0.1))) == RATE // 10
    with pytest.raises(InvalidRequest, match=f"x: {problem}"):
        reader.read_audio(content, param="x")


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_the_extensible_header_with_pcm_samples_is_read(reader: MediaReader, width: int) -> None:
    plain, extensible = (wav_bytes(width=width, channels=2, is_extensible=flag) for flag in (False, True))
    assert plain != extensible
    assert np.array_equal(samples(reader, extensible), samples(reader, plain))


def test_a_sound_of_which_no_length_is_known_goes_on_to_the_end_of_the_file(reader: MediaReader) -> None:
    content = bytearray(wav_bytes())
    content[40:44] = b"\xff\xff\xff\xff"
    assert np.array_equal(samples(reader, bytes(content)), samples(reader, wav_bytes()))


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
                samples(reader, damaged.tobytes())
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
    plain = Plain()
    vars(plain).update(processor)
    reader = MediaReader(plain, CONFIG)
    if longest_s is None:
        reader.read_audio(wav_bytes(seconds=4), param="x")
        return
    reader.read_audio(wav_bytes(seconds=longest_s), param="x")
    with pytest.raises(InvalidRequest, match=f"x: lasts 4.0 s, and this model takes {longest_s} s of a sound"):
        reader.read_audio(wav_bytes(seconds=4), param="x")


def test_no_memory_is_not_taken_for_a_refusal(reader: MediaReader, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*_: object, **_options: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Plain, "__call__", run_out)
        with pytest.raises(MemoryError):
            read(reader, image_bytes())
    monkeypatch.setattr("PIL.Image.open", run_out)
    with pytest.raises(MemoryError):
        read(reader, image_bytes())


def test_what_the_processor_makes_is_limited(reader: MediaReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_reader, "MAX_PREPARED_BYTES", 1 << 20)
    read(reader, image_bytes())
    with pytest.raises(InvalidRequest, match="x: prepared for the model, it takes 2 MiB of at most 1; send a smaller"):
        read(reader, image_bytes(size=(1000, 1000)))


def test_placeholders_are_texts_that_show() -> None:
    assert MediaReader(None, problem="none").placeholders == frozenset()
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


@pytest.mark.parametrize("step", [16, 48])
def test_text_in_steps_is_text_in_one_pass(loaded: LoadedModel, step: int) -> None:
    """Positions are right from the second step on, also where the model computes them in three axes."""
    model: Any = loaded.model
    ids = torch.randint(3, 400, (1, 150), generator=torch.Generator().manual_seed(step))
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        whole = model(input_ids=ids).logits[0]
        steps = torch.split(ids, step, dim=1)
        parts = [model(input_ids=part, past_key_values=cache, use_cache=True).logits[0] for part in steps]
    assert torch.allclose(torch.cat(parts), whole, atol=1e-4)
