"""Images and sounds as a multimodal model's processor gets them, and text through such a model in steps of the grid."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from diskprefix.engine.loader import LoadedModel, load_model
from diskprefix.engine.media import MediaProcessor
from diskprefix.errors import InvalidRequest, ModelError
from diskprefix.settings import Settings
from tests.server.media_models import (
    PARTS_ONLY,
    VISION_MODELS,
    image_bytes,
    wav_bytes,
    write_llava,
    write_qwen2_audio,
)

RATE = 16000


@pytest.fixture
def reader() -> MediaProcessor:
    """Over a processor of which only the rate is asked."""
    return MediaProcessor(
        SimpleNamespace(image_processor=object(), _audio_processor=SimpleNamespace(sampling_rate=RATE))
    )


def load(folder: Path) -> LoadedModel:
    return load_model(Settings(model=str(folder)), lambda _: None)


def test_the_kinds_are_those_of_the_processors_parts(tmp_path: Path) -> None:
    seeing, hearing = load(write_llava(tmp_path / "llava")).media, load(write_qwen2_audio(tmp_path / "audio")).media
    assert seeing is not None
    assert hearing is not None
    assert (*seeing.kinds, *hearing.kinds) == ("image", "audio")
    assert seeing.problem is hearing.problem is None


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_images_come_in_the_usual_formats(reader: MediaProcessor, kind: str) -> None:
    image = reader.read_image(image_bytes((200, 30, 30), (40, 30), kind), param="x")
    assert (image.mode, image.size) == ("RGB", (40, 30))
    assert np.abs(np.asarray(image)[29, 39].astype(int) - (200, 30, 30)).max() < 24


def test_a_format_that_is_read_seldom_is_not_read_at_all(reader: MediaProcessor) -> None:
    with pytest.raises(InvalidRequest, match=r"no image that can be read \(PNG, JPEG, WEBP, GIF, BMP\)"):
        reader.read_image(image_bytes(kind="TIFF"), param="x")


def test_a_photograph_is_turned_upright(reader: MediaProcessor) -> None:
    file = io.BytesIO()
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (40, 30)).save(file, "JPEG", exif=turned)
    assert reader.read_image(file.getvalue(), param="x").size == (30, 40)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "1", "CMYK"])
def test_every_mode_becomes_red_green_and_blue(reader: MediaProcessor, mode: str) -> None:
    file = io.BytesIO()
    Image.new(mode, (8, 8)).save(file, "JPEG" if mode == "CMYK" else "PNG")
    assert reader.read_image(file.getvalue(), param="x").mode == "RGB"


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2])
def test_samples_of_any_width_are_between_minus_one_and_one(reader: MediaProcessor, width: int, channels: int) -> None:
    samples = reader.read_audio(wav_bytes(width=width, channels=channels), param="x")
    expected = np.sin(2 * np.pi * 440 * np.arange(RATE // 2) / RATE) / 2
    assert samples.dtype == np.float32
    assert np.abs(samples - expected).max() < (0.01 if width == 1 else 1e-4)


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_a_sound_at_another_rate_is_the_same_sound(reader: MediaProcessor, rate: int) -> None:
    samples = reader.read_audio(wav_bytes(rate=rate, seconds=0.5), param="x")
    # A whole number of periods: no edge at the ends.
    expected = np.sin(2 * np.pi * 440 * np.arange(RATE // 2) / RATE) / 2
    assert len(samples) == len(expected)
    assert np.abs(samples - expected).max() < 2e-3


def test_what_the_wanted_rate_cannot_hold_is_left_out_not_folded_down(reader: MediaProcessor) -> None:
    assert np.abs(reader.read_audio(wav_bytes(rate=48000, hertz=12000), param="x")).max() < 1e-3


def test_sounds_count_together(reader: MediaProcessor) -> None:
    content = wav_bytes(seconds=301, rate=4000, width=1)
    first = reader.read_audio(content, param="x")
    with pytest.raises(InvalidRequest, match="more than 600 s of sound"):
        reader.read_audio(content, param="x", beside=[first])


def test_without_pillow_the_model_takes_text_and_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_llava(tmp_path / "llava")
    (folder / "processor_config.json").unlink()
    monkeypatch.setattr("transformers.utils.is_vision_available", lambda: False)
    media = load(folder).media
    assert media is not None
    assert media.kinds == frozenset()
    assert "pip install 'diskprefix[media]'" in (media.problem or "")
    assert caplog.text.count("this model is served for text only: Pillow is not installed") == 1


def test_the_chat_template_may_be_where_processors_have_it(tmp_path: Path) -> None:
    import json

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
    from transformers import DynamicCache

    ids = torch.randint(3, 400, (1, 150), generator=torch.Generator().manual_seed(step))
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        whole = model(input_ids=ids).logits[0]
        steps = torch.split(ids, step, dim=1)
        parts = [model(input_ids=part, past_key_values=cache, use_cache=True).logits[0] for part in steps]
    assert torch.allclose(torch.cat(parts), whole, atol=1e-4)
