"""Pictures as a multimodal model's processor gets them, and text through such a model in steps."""

from __future__ import annotations

import io
import json
import os
import struct
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from transformers import DynamicCache

from diskprefix.daemon.settings import Settings
from diskprefix.errors import InvalidRequest, ModelError
from diskprefix.runtime.grid.cache_argument import cache_argument
from diskprefix.runtime.load import loader
from diskprefix.runtime.load.loader import LoadedModel, load_model
from diskprefix.runtime.pictures import picture_reader
from diskprefix.runtime.pictures.picture_reader import PictureReader
from diskprefix.values import Picture
from tests.daemon.server.picture_models import PARTS_ONLY, VISION_MODELS, image_bytes, write_llava

ORIENTATION = 0x0112


class Plain:
    """A processor that hands on what it gets: four tokens a picture."""

    tokenizer = SimpleNamespace()
    image_processor = object()
    image_token = "<image>"

    def __call__(self, text: str, images: Any, **_: Any) -> dict[str, Any]:
        pixels = {"pixel_values": np.array(images[0][0])}
        offsets = [[{"replacement": text * 4}]]
        return {"input_ids": np.array([[7] * 4]), "text_replacement_offsets": offsets, **pixels}


CONFIG = SimpleNamespace(image_token_id=7)


@pytest.fixture
def reader() -> PictureReader:
    return PictureReader.of(Plain(), CONFIG)


def load(folder: Path) -> LoadedModel:
    return load_model(Settings(model=str(folder)), lambda _: None)


def read(reader: PictureReader, content: bytes, detail: Any = "auto", beside: Any = ()) -> Picture:
    return reader.read_image(content, detail=detail, param="x", beside=beside)


def pixels(reader: PictureReader, content: bytes) -> Any:
    return read(reader, content).prepare()["pixel_values"].astype(int)


def test_a_picture_can_be_prepared_again(reader: PictureReader) -> None:
    picture = read(reader, image_bytes())
    assert np.array_equal(*(picture.prepare()["pixel_values"] for _ in range(2)))


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def test_a_processor_without_a_token_for_images_takes_none() -> None:
    for lacking in (SimpleNamespace(image_token="<image>"), SimpleNamespace(image_processor=object())):
        assert PictureReader.of(lacking, CONFIG).problem == "its processor has no placeholder for an image"


@pytest.fixture(scope="module", params=VISION_MODELS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(VISION_MODELS[request.param](tmp_path_factory.mktemp("models") / "m"))


@pytest.mark.cases(4)
@pytest.mark.parametrize("size", [(90, 50), (31, 64), (24, 500)])
def test_a_picture_is_what_the_models_own_processor_makes_of_it(loaded: LoadedModel, size: tuple[int, int]) -> None:
    """Its text in the place of the mark gives the processor's tokens, and its tensors are the processor's: found from
    the header alone, and as many tokens as the encoder has rows."""
    reader = loaded.processor
    assert isinstance(reader, PictureReader)
    assert reader.problem is None
    assert reader.mark in reader.placeholders
    content = image_bytes(size=size)
    picture = read(reader, content)
    text, images = f"Look:\n{reader.mark}\nWell?", [[Image.open(io.BytesIO(content))]]
    expected = dict(reader._processor(text=text, return_tensors="pt", images=images))
    tokens = reader._processor.tokenizer(text.replace(reader.mark, picture.text))["input_ids"]
    assert tokens == expected["input_ids"][0].tolist()
    assert tokens.count(reader.token_id) == picture.num_tokens > 0
    prepared = picture.prepare()
    assert prepared.keys() == {name for name in expected if "pixel" in name or name in prepared}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in prepared.items())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in picture.shape.items())
    assert ("image_grid_thw" in picture.shape) == ("image_grid_thw" in expected)
    with torch.inference_mode():
        assert loaded.encoder is not None
        rows = loaded.encoder().get_image_features(**prepared).pooler_output
    rows = torch.cat([row.flatten(0, -2) for row in rows]) if isinstance(rows, list | tuple) else rows.flatten(0, -2)
    assert len(rows) == picture.num_tokens


def test_a_name_is_that_of_the_bytes_of_what_is_asked_of_the_processor_and_of_the_decoder(
    reader: PictureReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, large = image_bytes(), image_bytes(size=(900, 600))
    assert read(reader, content).name == read(reader, content).name == read(reader, content, "low").name

    def plain(to_dict: Any) -> Any:
        return lambda: SimpleNamespace(to_dict=to_dict)

    settings = plain(lambda: {"size": 1})
    other = PictureReader(settings)
    assert reader._settings != other._settings != PictureReader(plain(dict))._settings
    names = [read(reader, one, detail).name for one in (content, image_bytes((1, 2, 3)), large) for detail in ("low",)]
    assert len({*names, read(reader, large).name}) == 4
    assert all(len(name) == 16 for name in names)
    (tmp_path / "worker.py").write_text("another one")
    monkeypatch.setattr(picture_reader, "_WORKER", tmp_path / "worker.py")
    assert other._settings != PictureReader(settings)._settings


@pytest.mark.cases(2)
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
    reader: PictureReader, detail: str, size: tuple[int, int], expected: tuple[int, int]
) -> None:
    picture = read(reader, saved(Image.new("L", size)), detail)
    assert picture.size == f"{size[0]}x{size[1]}"
    assert picture.prepare()["pixel_values"].shape == (expected[1], expected[0], 3)


def test_a_known_size_costs_the_processor_nothing(reader: PictureReader, monkeypatch: pytest.MonkeyPatch) -> None:
    first = read(reader, image_bytes((1, 2, 3)))
    monkeypatch.setattr(Plain, "__call__", None)
    second = read(reader, image_bytes((3, 2, 1)))
    assert (second.text, second.num_tokens) == (first.text, first.num_tokens) == ("<image>" * 4, 4)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_images_come_in_the_usual_formats(reader: PictureReader, kind: str) -> None:
    image = pixels(reader, image_bytes((200, 30, 30), (40, 30), kind))
    assert image.shape == (30, 40, 3)
    assert np.abs(image[29, 39] - (200, 30, 30)).max() < 24


@pytest.mark.parametrize("content", [image_bytes(kind="TIFF"), b"hello", b""], ids=["seldom read", "no image", "empty"])
def test_the_picture_reader_refuses_other_files_without_object_addresses(reader: PictureReader, content: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"x: is not an image that can be read \(PNG, JPEG, WEBP, GIF, BMP\)$"):
        read(reader, content)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photograph_is_turned_upright(reader: PictureReader, orientation: int) -> None:
    image, turned = Image.open(io.BytesIO(image_bytes())), Image.Exif()
    turned[ORIENTATION] = orientation
    content = saved(image, exif=turned)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    assert read(reader, content).size == f"{expected.width}x{expected.height}"
    assert np.array_equal(pixels(reader, content), np.asarray(expected))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "1", "CMYK", "L"])
def test_every_mode_becomes_red_green_and_blue(reader: PictureReader, mode: str) -> None:
    assert pixels(reader, saved(Image.new(mode, (8, 8)), "JPEG" if mode == "CMYK" else "PNG")).shape == (8, 8, 3)


def test_what_can_be_seen_through_is_white(reader: PictureReader) -> None:
    clear = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    palette = Image.new("P", (4, 4), 0)
    for content in (saved(clear), saved(clear, "WEBP", lossless=True), saved(palette, transparency=0)):
        assert (pixels(reader, content) == 255).all()
    half = Image.new("RGBA", (4, 4), (255, 0, 0, 128))
    assert pixels(reader, saved(half))[0, 0].tolist() == [255, 127, 127]


def test_sixteen_bits_of_grey_keep_their_shades(reader: PictureReader) -> None:
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    assert np.array_equal(pixels(reader, saved(Image.fromarray(ramp)))[:, 0, 0], np.arange(256))


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "MPO"])
def test_the_first_frame_of_an_animation_or_of_a_photograph_is_taken(reader: PictureReader, kind: str) -> None:
    frames = [Image.new("RGB", (40, 30), (shade, 0, 0)) for shade in (250, 0, 120)]
    first, *others = frames
    image = pixels(reader, saved(first, kind, save_all=True, append_images=others))
    assert image.shape == (30, 40, 3)
    assert np.abs(image - (250, 0, 0)).max() < 24


def png_of(width: int, height: int) -> bytes:
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    content = image_bytes()
    return content[:12] + header + struct.pack(">I", zlib.crc32(header)) + content[33:]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (png_of(9000, 9000), "the image has more than 64 megapixels; send smaller ones"),
        (png_of(10_000, 10_000), "the image has more than 64 megapixels"),
        (png_of(60_000, 60_000), "the image has more than 64 megapixels"),
        (png_of(1, 6000), "the image has 1x6000 pixels; one side may be at most 200 times as long as the other"),
        (png_of(0, 6), "is not an image that can be read"),
    ],
)
def test_a_picture_with_impossible_sides_is_refused_before_it_is_decoded(
    reader: PictureReader, content: bytes, problem: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"x: {problem}"):
        read(reader, content)


def test_pixels_count_together(reader: PictureReader) -> None:
    screenshots: list[Picture] = []
    for number in range(200):
        screenshots.append(read(reader, png_of(1920 - number % 2, 1080), beside=screenshots))
    with pytest.raises(InvalidRequest, match="x: the images of the request have more than 512 megapixels"):
        read(reader, png_of(8000, 8000), beside=[*screenshots, read(reader, png_of(8000, 8000))])


def test_many_frames_cost_nothing(reader: PictureReader) -> None:
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
def test_a_truncated_file_is_refused_and_the_reason_said(reader: PictureReader, content: bytes) -> None:
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


def test_the_header_reader_only_refuses_damaged_pictures(reader: PictureReader) -> None:
    refused = 0
    for content in mutated(200):
        try:
            read(reader, content)
        except InvalidRequest:
            refused += 1
    assert refused > 100


@pytest.mark.slow
def test_the_decoder_only_refuses_damaged_pictures(reader: PictureReader) -> None:
    refused = 0
    for content in mutated(80):
        try:
            read(reader, content).prepare()
        except InvalidRequest:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("program", "problem", "is_kept"),
    [
        ("import time; time.sleep(60)", "its decoder crashes, or takes too much time or memory", False),
        ("import os; os.kill(os.getpid(), 9)", "its decoder crashes, or takes too much time or memory", False),
        ("import os; os.abort()", "its decoder crashes, or takes too much time or memory", True),
        ("pass", "its decoder crashes, or takes too much time or memory", True),
        ("raise OSError('the end came early')", "the end came early", True),
    ],
    ids=["hangs", "is killed", "crashes", "says nothing", "fails"],
)
def test_a_decoder_that_does_not_answer_is_ended_and_the_picture_refused_until_it_may_answer(
    reader: PictureReader,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    problem: str,
    is_kept: bool,
) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(program)
    monkeypatch.setattr(picture_reader, "_WORKER", worker)
    monkeypatch.setattr(picture_reader, "_DECODING_S", 0.5 if "sleep" in program else 30)
    # Another picture each time: the reader knows those of earlier cases.
    content = saved(Image.new("RGB", (40 + len(program), 30)))
    with pytest.raises(InvalidRequest, match=f"^x: cannot be decoded: {problem}$"):
        read(reader, content).prepare()
    if is_kept:
        with pytest.raises(InvalidRequest, match=f"^x: cannot be decoded: {problem}$"):
            read(reader, content)
    else:
        assert read(reader, content)


@pytest.mark.slow
def test_a_decoder_may_take_no_more_memory_than_its_limit() -> None:
    """The largest picture that is accepted fits, with transparency and a turn."""
    content = saved(Image.new("RGBA", (8192, 8192)), compress_level=1)
    asked = ("PNG", 4, (8192, 8192), (512, 512))
    assert picture_reader._decode(content, asked, "x").size == (512, 512)


def test_no_memory_is_not_taken_for_a_refusal(reader: PictureReader, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*_: object, **_options: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Plain, "__call__", run_out)
        with pytest.raises(MemoryError):
            read(reader, image_bytes())
    monkeypatch.setattr("PIL.Image.open", run_out)
    with pytest.raises(MemoryError):
        read(reader, image_bytes())


def test_what_the_processor_makes_is_limited(reader: PictureReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture_reader, "MAX_PREPARED_BYTES", 1 << 20)
    read(reader, image_bytes())
    with pytest.raises(InvalidRequest, match="x: prepared for the model, it takes 2 MiB of at most 1; send a smaller"):
        read(reader, image_bytes(size=(1000, 1000)))


def test_placeholders_are_texts_that_show() -> None:
    assert PictureReader(problem="none").placeholders == frozenset()
    assert PictureReader.of(
        SimpleNamespace(image_processor=1, image_token="[IMG]", row_token="\n"), CONFIG
    ).placeholders == {"[IMG]"}


def test_without_pillow_a_model_takes_text_and_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_llava(tmp_path / "m")
    (folder / "processor_config.json").unlink()
    monkeypatch.setattr("transformers.utils.is_vision_available", lambda: False)
    processor = load(folder).processor
    assert processor is not None
    assert processor.problem == "Pillow is not installed: pip install pillow"


def test_processor_and_encoder_are_read_for_the_first_picture_but_not_of_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_llava(tmp_path / "m")
    first = load(folder).processor
    monkeypatch.setattr(picture_reader, "_load_processor", lambda *_: pytest.fail("it is read"))
    monkeypatch.setattr(loader._ModelSource, "modules", lambda *_, **__: pytest.fail("it is read"))
    again = load(folder)
    told = [(one.problem, one.mark, one.token_id, one.placeholders) for one in (first, again.processor) if one]
    assert told[0] == told[1]
    assert again.encoder is not None
    assert isinstance(again.processor, PictureReader)
    for late in (again.encoder, partial(read, again.processor, image_bytes())):
        with pytest.raises(pytest.fail.Exception):
            late()
    monkeypatch.setattr(loader._ModelSource, "modules", lambda *_, **__: None)
    os.utime(folder / "model.safetensors")
    with pytest.raises(ModelError, match="was changed"):
        again.encoder()
    with pytest.raises(pytest.fail.Exception):
        load(folder)


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


@pytest.mark.cases(8)
@pytest.mark.parametrize("step", [16, 48])
def test_text_in_steps_is_text_in_one_pass(loaded: LoadedModel, step: int) -> None:
    """Positions are right from the second step on, also where the model computes them in three axes."""
    model: Any = loaded.read_modules()
    ids = torch.randint(3, 400, (1, 150), generator=torch.Generator().manual_seed(step))
    cache, argument = DynamicCache(config=model.config), str(cache_argument(type(model).forward))
    with torch.inference_mode():
        whole = model(input_ids=ids).logits[0]
        steps = torch.split(ids, step, dim=1)
        parts = [model(input_ids=part, **{argument: cache}, use_cache=True).logits[0] for part in steps]
    assert torch.allclose(torch.cat(parts), whole, atol=1e-4)
