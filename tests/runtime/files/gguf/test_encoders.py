"""A `.gguf` model with its `mmproj` file has the numbers of the model of which llama.cpp's converter makes the two."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForMultimodalLM

from diskprefix.daemon.settings import Settings
from diskprefix.errors import ModelError
from diskprefix.runtime.files.fit import needs_of_gguf
from diskprefix.runtime.files.gguf.encoders import make_composite
from diskprefix.runtime.files.gguf.gguf import GgufModel
from diskprefix.runtime.files.gguf.gguf_header import GgufHeader
from diskprefix.runtime.files.gguf.metadata import Metadata
from diskprefix.runtime.files.projector import preferred_projectors, projector_beside
from diskprefix.runtime.load.loader import LoadedModel, load_model
from diskprefix.runtime.plan.model_config import ModelConfig
from tests.daemon.server.picture_models import VISION_MODELS, TinyPictured, image_bytes
from tests.runtime.plan import tiny
from tests.runtime.plan.gguf_files import BASE, EPSILON, RMS, filled, names_of, paired, rope, stored, written

pytestmark = pytest.mark.usefixtures("cache")
Values = dict[str, Any]
CLIP: Values = {
    "vision.embedding_length": 32,
    "vision.feed_forward_length": 64,
    "vision.block_count": 2,
    "vision.attention.head_count": 2,
    "vision.attention.layer_norm_epsilon": 1e-6,
    "vision.projection_dim": 64,
    "vision.image_size": 28,
    "vision.image_mean": [0.5, 0.4, 0.3],
    "vision.image_std": [0.5, 0.25, 0.5],
}
OF_SIGLIP = CLIP | {"vision.patch_size": 7, "vision.attention.layer_norm_epsilon": 3e-6, "use_gelu": True}
SECTIONS = {"rope.freq_base": 250000.0, "rope.dimension_sections": [2, 3, 3, 0]}
HEAD = {"attention.key_length": 16, "attention.value_length": 16}


@dataclass(frozen=True, kw_only=True)
class Family:
    """The tiny model `pictured` with other `text` and `vision`, and what its two files say. `hub` turns names of
    parameters into those that the `gguf` library knows, as the converter does. `more` are tokens beside its own."""

    pictured: TinyPictured
    text: Values
    vision: Values = field(default_factory=dict)
    more: tuple[str, ...] = ()
    architecture: str
    of_text: Values
    projector: str
    of_vision: Values
    hub: tuple[tuple[str, str], ...] = ()

    @property
    def tokens(self) -> list[str]:
        return [*self.pictured.special.values(), *self.more]


FAMILIES = {
    "Qwen3-VL": Family(
        pictured=VISION_MODELS["qwen3_vl"],
        text={"rope_parameters": rope(mrope_section=[2, 3, 3], mrope_interleaved=True)},
        vision={"deepstack_visual_indexes": [1]},
        architecture="qwen3vl",
        of_text=HEAD | SECTIONS | {"n_deepstack_layers": 1},
        projector="qwen3vl_merger",
        of_vision=CLIP
        | {"vision.patch_size": 4, "use_gelu": True, "vision.spatial_merge_size": 2, "vision.block_count": 3}
        | {"vision.is_deepstack_layers": [False, True, False]},
        hub=(
            (r"model\.visual", "visual"),
            (r"visual\.merger\.norm", "visual.merger.ln_q"),
            (r"visual\.merger\.linear_fc1", "visual.merger.mlp.0"),
            (r"visual\.merger\.linear_fc2", "visual.merger.mlp.2"),
            (r"visual\.deepstack_merger_list\.0", "model.visual.deepstack_merger_list.1"),
        ),
    ),
    "Qwen2.5-VL": Family(
        pictured=VISION_MODELS["qwen2_5_vl"],
        text={"rope_parameters": rope(mrope_section=[2, 3, 3])},
        vision={"window_size": 112},
        architecture="qwen2vl",
        of_text=SECTIONS,
        projector="qwen2.5vl_merger",
        of_vision=CLIP | {"vision.patch_size": 4, "use_silu": True, "vision.n_wa_pattern": 2},
        hub=((r"model\.visual", "visual"),),
    ),
    "Gemma 3": Family(
        pictured=VISION_MODELS["gemma3"],
        text={"query_pre_attn_scalar": 16, "sliding_window": 16, "tie_word_embeddings": True}
        | {"rope_parameters": {"sliding_attention": rope(10000.0), "full_attention": rope()}, "layer_types": None},
        vision={"layer_norm_eps": 3e-6, "vision_use_head": False},
        more=("<unused0>",),
        architecture="gemma3",
        of_text=HEAD | {"attention.sliding_window": 16, "rope.freq_base": 250000.0},
        projector="gemma3",
        of_vision=OF_SIGLIP | {"vision.projector.scale_factor": 2},
        hub=(
            (r"model\.(vision_tower)", r"\1.vision_model"),
            (r"model\.(multi_modal_projector)", r"\1"),
            ("projection_weight", "projection.weight"),
        ),
    ),
    "Gemma 4": Family(
        pictured=VISION_MODELS["gemma4"],
        text={"sliding_window": 16, "tie_word_embeddings": True, "hidden_size_per_layer_input": 0}
        | {
            "rope_parameters": {
                "sliding_attention": rope(10000.0),
                "full_attention": rope() | {"rope_type": "proportional"},
            }
        }
        | {"vocab_size_per_layer_input": 0, "final_logit_softcapping": 30.0},
        vision={"use_clipped_linears": True, "standardize": True},
        architecture="gemma4",
        of_text={"attention.key_length": 32, "attention.value_length": 32, "attention.sliding_window": 16}
        | {"attention.key_length_swa": 16, "attention.value_length_swa": 16, "rope.freq_base": 250000.0}
        | {"rope.freq_base_swa": 10000.0, "rope.dimension_count": 32, "rope.dimension_count_swa": 16}
        | {"attention.sliding_window_pattern": [True, False], "attention.shared_kv_layers": 0},
        projector="gemma4v",
        of_vision=CLIP | {"vision.patch_size": 4, "has_audio_encoder": False},
        hub=(
            (r"model\.vision_tower\.encoder", "vision_model.model"),
            (r"\.linear\.weight", ".weight"),
            ("position_embedding_table", "position_embedding_table.weight"),
        ),
    ),
    "Mistral 3": Family(
        pictured=VISION_MODELS["mistral3"],
        text={"model_type": "ministral3"}
        | {"rope_parameters": rope(llama_4_scaling_beta=0.0, original_max_position_embeddings=4096)},
        vision={"hidden_act": "silu", "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0}},
        architecture="mistral3",
        of_text=HEAD | {"rope.dimension_count": 16, "rope.freq_base": 250000.0},
        projector="pixtral",
        of_vision=CLIP
        | {"vision.patch_size": 4, "vision.image_size": 64, "vision.attention.layer_norm_epsilon": 1e-5}
        | {"use_silu": True, "vision.spatial_merge_size": 2},
        hub=((r"model\.(vision_tower|multi_modal_projector)", r"\1"),),
    ),
    "SmolVLM": Family(
        pictured=VISION_MODELS["idefics3"],
        text={"rope_parameters": rope()},
        vision={"layer_norm_eps": 3e-6},
        architecture="llama",
        of_text={"rope.dimension_count": 16, "rope.freq_base": 250000.0},
        projector="idefics3",
        of_vision=OF_SIGLIP
        | {"vision.projector.scale_factor": 2, "vision.image_size": 32, "vision.patch_size": 8}
        | {"vision.preproc_image_size": 64},
    ),
}


def made(family: Family) -> Any:
    tokens, one = [*tiny.tokens(), *family.tokens], family.pictured
    text = BASE | EPSILON | {"vocab_size": len(tokens)} | one.text | family.text
    config = getattr(transformers, f"{one.kind}Config")(
        text_config=text,
        vision_config=one.vision | family.vision,
        tie_word_embeddings=text.get("tie_word_embeddings", False),
        **{name: tokens.index(one.special[token]) for name, token in one.ids.items()},
        **one.beside,
    )
    torch.manual_seed(0)
    return filled(AutoModelForMultimodalLM.from_config(config, dtype=torch.float32))


def text_tensors(family: Family, model: Any) -> dict[str, torch.Tensor]:
    state, has_head = dict[str, torch.Tensor](), not model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if name.startswith(("model.language_model.", "model.text_model.")) or (has_head and name == "lm_head.weight"):
            state[re.sub(r"^model\.(language|text)_model\.", "model.", name)] = tensor
    return stored(state, family.architecture, model.config.text_config.num_hidden_layers)


def encoder_tensors(family: Family, model: Any) -> dict[str, torch.Tensor]:
    found, names = dict[str, torch.Tensor](), names_of(gguf.MODEL_ARCH.MMPROJ, 8)
    for name, tensor in model.state_dict().items():
        if name.startswith(("model.language_model.", "model.text_model.", "lm_head")):
            continue
        if name == "model.visual.patch_embed.proj.weight":
            found |= {"v.patch_embd.weight": tensor[:, :, 0], "v.patch_embd.weight.1": tensor[:, :, 1]}
            continue
        for pattern, other in family.hub:
            name = re.sub(pattern, other, name)
        if family.projector == "pixtral" and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = paired(tensor, 2)
        if "patch_embedder.input_proj" in name:
            tensor = tensor.reshape(len(tensor), 4, 4, 3).permute(0, 3, 1, 2)
        parts = {name: tensor}
        if family.projector == "qwen2.5vl_merger" and ".qkv." in name:
            parts = {name.replace("qkv", part): rows for part, rows in zip("qkv", tensor.chunk(3), strict=True)}
        for part, rows in parts.items():
            rows = rows + 1 if "soft_emb_norm" in part else rows.reshape(rows.shape or (1,))
            # Some have no ending.
            stem, _, end = part.rpartition(".")
            found[names.get_name(part) or f"{names.get_name(stem)}.{end}"] = rows
    return found


def write_encoder(path: Path, family: Family, tensors: dict[str, torch.Tensor], kind: str = "F32", **more: Any) -> Path:
    values = {"has_vision_encoder": True, "projector_type": family.projector} | family.of_vision
    values |= {key.replace("__", "."): value for key, value in more.items()}
    return written(path, "clip", None, values, tensors, gguf.GGMLQuantizationType[kind])


def write_model(
    folder: Path, family: Family, model: Any, *, encoder: str = "mmproj-F32.gguf", kind: str = "F32"
) -> Path:
    """Writes the two files. Returns that of the text, in the type `kind`."""
    write_encoder(folder / encoder, family, encoder_tensors(family, model))
    config, form, file = model.config.text_config, gguf.GGMLQuantizationType[kind], folder / "tiny.gguf"
    values, tensors = RMS | family.of_text, text_tensors(family, model)
    return written(file, family.architecture, config, values, tensors, form, family.tokens)


def loaded(file: Path, lines: list[str] | None = None, **settings: Any) -> LoadedModel:
    return load_model(Settings(model=str(file), **settings), ([] if lines is None else lines).append)


@torch.inference_mode()
def logits_of(model: Any, found: LoadedModel) -> torch.Tensor:
    assert found.processor is not None
    of_pictures = vars(found.processor)["_processor"].image_processor
    # Gemma 4 scales each picture to so many tokens.
    of_pictures.max_soft_tokens = 70
    picture = found.processor.read_image(image_bytes(size=(48, 40)), detail="auto", param="messages")
    ids = torch.tensor([found.tokenizer.encode(f"hello {picture.text} hello")])
    assert int((ids == found.processor.token_id).sum()) == picture.num_tokens > 1
    inputs = {
        name: one for name, one in picture.prepare().items() if name not in ("num_soft_tokens_per_image", "num_crops")
    }
    marked = {"mm_token_type_ids": (ids == found.processor.token_id).long()}
    if model.config.model_type == "gemma3":
        marked = {"token_type_ids": marked["mm_token_type_ids"]}
    if model.config.model_type in ("idefics3", "mistral3"):
        marked = {}
    logits: torch.Tensor = model(input_ids=ids, **inputs, **marked).logits
    return logits


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_of_two_files_has_the_parameters_and_logits_of_the_model(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    model, lines = made(family), list[str]()
    found = loaded(write_model(tmp_path, family, model), lines, dtype="float32")
    assert "pictures are encoded by mmproj-F32.gguf" in lines
    assert found.encoder is not None
    modules, encoder, expected = found.read_modules(), found.encoder(), model.state_dict()
    assert encoder is not None
    assert modules.state_dict().keys() == expected.keys() > encoder.state_dict().keys()
    for state in (modules.state_dict(), encoder.state_dict()):
        assert [name for name in state if not torch.equal(state[name], expected[name])] == []
    assert torch.equal(logits_of(modules, found), logits_of(model, found))
    assert vars(found.processor)["_processor"].image_processor.image_mean == pytest.approx([0.5, 0.4, 0.3])


@pytest.fixture(scope="module")
def smol() -> tuple[Family, Any]:
    return FAMILIES["SmolVLM"], made(FAMILIES["SmolVLM"])


Smol = tuple[Family, Any]


def test_the_text_decoder_keeps_its_quants_next_to_a_bfloat16_encoder(smol: Smol, tmp_path: Path) -> None:
    file = write_model(tmp_path, *smol, kind="Q8_0")
    encoder = write_encoder(tmp_path / "mmproj-Q8_0.gguf", smol[0], encoder_tensors(*smol), "Q8_0")
    (tmp_path / "mmproj-F32.gguf").unlink()
    found = loaded(file)
    assert found.weights is not None
    assert found.encoder is not None
    of_text, of_encoder = [one for _, one in found.weights.named()], [*found.encoder().parameters()]
    assert {one.dtype for one in of_text} == {np.dtype(np.uint16), np.dtype(np.uint8)}
    assert {one.dtype for one in of_encoder} == {torch.bfloat16}
    taken = {one.ctypes.data: one.nbytes for one in of_text} | {one.data_ptr(): one.nbytes for one in of_encoder}
    assert needs_of_gguf(file, "auto").weights_bytes == pytest.approx(sum(taken.values()), rel=0.02)
    with_encoder = needs_of_gguf(file, "auto").weights_bytes
    encoder.unlink()
    assert with_encoder - needs_of_gguf(file, "auto").weights_bytes == 2 * sum(
        tensor.numel() for tensor in encoder_tensors(*smol).values()
    )


def test_a_model_without_its_encoder_takes_text_only_and_another_encoder_changes_its_identity(
    smol: Smol, tmp_path: Path
) -> None:
    file = write_model(tmp_path, *smol)
    digest = loaded(file).weights_digest
    tensors = encoder_tensors(*smol)
    write_encoder(tmp_path / "mmproj-F32.gguf", smol[0], tensors | {"v.post_ln.bias": tensors["v.post_ln.bias"] + 1})
    other = loaded(file)
    (tmp_path / "mmproj-F32.gguf").unlink()
    text = loaded(file)
    assert len({digest, other.weights_digest, text.weights_digest}) == 3
    assert (text.processor, text.encoder, text.config.model_type) == (None, None, "llama")


def test_the_encoder_named_like_the_model_is_preferred_then_the_best_form() -> None:
    names = ["mmproj-F16.gguf", "mmproj-F32.gguf", "Other-mmproj-BF16.gguf", "X-VL-2B-Q8_0.gguf", "mmproj-BF16.gguf"]
    expected = ["mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf", "Other-mmproj-BF16.gguf"]
    assert preferred_projectors(names, "X-VL-2B-Q4_K_M.gguf") == expected
    own = ["mmproj-X-VL-2B-Q8_0.gguf", "mmproj-X-VL-2B-F32.gguf"]
    assert preferred_projectors([*own[::-1], *names], "X-VL-2B-Q4_K_M.gguf")[:3] == [*own, "mmproj-BF16.gguf"]


def test_the_projector_layer_of_ollamas_manifest_is_the_encoder_of_the_model(smol: Smol, tmp_path: Path) -> None:
    write_model(tmp_path, *smol)
    (tmp_path / "blobs").mkdir()
    layers = []
    for kind, name in (("model", "tiny.gguf"), ("projector", "mmproj-F32.gguf")):
        blob = tmp_path / "blobs" / f"sha256-{sha256((tmp_path / name).read_bytes()).hexdigest()}"
        (tmp_path / name).rename(blob)
        layers.append({"mediaType": f"application/vnd.ollama.image.{kind}", "digest": blob.name.replace("-", ":")})
    # Another model may have the same weights alone.
    for name, own in (("first", layers[:1]), ("sees", layers)):
        manifest = tmp_path / "manifests/registry.ollama.ai/library" / name / "1b"
        manifest.parent.mkdir(parents=True)
        manifest.write_text(json.dumps({"layers": own}))
    lines: list[str] = []
    assert loaded(tmp_path / "blobs" / layers[0]["digest"].replace(":", "-"), lines).processor is not None
    assert f"pictures are encoded by {layers[1]['digest'].replace(':', '-')}" in lines


def test_files_of_old_converters_have_the_matrices_of_a_feed_forward_part_by_each_others_names(
    smol: Smol, tmp_path: Path
) -> None:
    file, tensors = write_model(tmp_path, *smol), encoder_tensors(*smol)
    other = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    swapped = {re.sub("ffn_(up|down)", lambda part: other[part[0]], name): one for name, one in tensors.items()}
    write_encoder(tmp_path / "mmproj-F32.gguf", smol[0], swapped, vision__feed_forward_length=0)
    state, expected = loaded(file, dtype="float32").read_modules().state_dict(), smol[1].state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"vision__projection_dim": 65}, "it is of a model of width 65, and this one has 64"),
        ({"projector_type": "mlp"}, "it has the projector 'mlp', which is not read for llama"),
        ({"has_vision_encoder": False}, "it has the projector '', which is not read for llama"),
    ],
)
def test_an_encoder_of_another_model_is_left_out_with_the_reason(
    values: Values, reason: str, smol: Smol, tmp_path: Path
) -> None:
    file, lines = write_model(tmp_path, *smol), list[str]()
    write_encoder(tmp_path / "mmproj-F32.gguf", smol[0], encoder_tensors(*smol), **values)
    assert loaded(file, lines).processor is None
    assert f"mmproj-F32.gguf is not used: {reason}" in lines


Change = Callable[[dict[str, torch.Tensor]], Any]


@pytest.mark.parametrize(
    ("change", "values", "words"),
    [
        (lambda tensors: tensors.pop("v.blk.1.ln2.weight"), {}, r"lacks the tensor v\.blk\.1\.ln2\.weight"),
        (lambda tensors: tensors.update({"v.extra": torch.ones(4)}), {}, r"nothing in the model takes .*v\.extra"),
        (
            lambda tensors: tensors.update({"mm.model.fc.weight": torch.ones(64, 96)}),
            {},
            r"takes \(64, 128\) .* \(64, 96\)",
        ),
        (lambda _: None, {"vision__swiglu_clamp": 7.0}, r"clip\.vision\.swiglu_clamp is 7, and nothing here reads it"),
        (lambda _: None, {"use_gelu": False, "use_silu": True}, "computes with silu, and the model with gelu"),
        (lambda _: None, {"vision__block_count": 9999}, r"vision\.block_count is 9999: no encoder has so many"),
        (lambda _: None, {"vision__patch_size": 0}, "the metadata of the mmproj file are not those of idefics3"),
        (lambda _: None, {"vision__image_mean": 1.0}, r"image_mean is 1, which is not an array of numbers"),
        (lambda _: None, {"vision__attention.head_count": None}, r"lacks clip\.vision\.attention\.head_count"),
    ],
)
def test_an_unfitting_encoder_is_refused(
    change: Change, values: Values, words: str, smol: Smol, tmp_path: Path
) -> None:
    file, tensors = write_model(tmp_path, *smol), encoder_tensors(*smol)
    change(tensors)
    write_encoder(tmp_path / "mmproj-F32.gguf", smol[0], tensors, **values)

    def read() -> None:
        found = loaded(file)
        assert found.encoder is not None
        found.encoder()

    with pytest.raises(ModelError, match=words):
        read()


def test_a_truncated_encoder_and_a_vocabulary_without_its_token_are_refused(smol: Smol, tmp_path: Path) -> None:
    file = write_model(tmp_path, *smol)
    encoder = tmp_path / "mmproj-F32.gguf"
    for num_bytes in (-100, 1000, 4):
        encoder.write_bytes(encoder.read_bytes()[:num_bytes])
        with pytest.raises(ModelError, match=r"mmproj-F32\.gguf"):
            loaded(file)
        with pytest.raises(ModelError, match=r"mmproj-F32\.gguf"):
            needs_of_gguf(file, "auto")
    family, model = FAMILIES["Gemma 3"], made(FAMILIES["Gemma 3"])
    file = write_model(tmp_path, family, model)
    file.write_bytes(file.read_bytes().replace(b"<image_soft_token>", b"<image_hard_token>"))
    found = loaded(file)
    assert found.tokenizer.backend_tokenizer.id_to_token(found.config.image_token_id) == "<unused0>"
    logits_of(found.read_modules(), found)
    file = write_model(tmp_path, *smol)
    file.write_bytes(file.read_bytes().replace(b"<image>", b"<imago>"))
    with pytest.raises(ModelError, match="the file has no token <image>, which models with pictures have"):
        loaded(file)


ODD = ((1, 2), (8, 8, 8, 8), "é".encode("latin-1"), 2**32 - 1, None, ("a", "b"))
"""Different numbers, those of more blocks, what is not UTF-8, the largest unsigned number, arrays of arrays, texts."""


@pytest.mark.parametrize("family", FAMILIES)
def test_an_odd_value_of_an_encoder_is_refused_if_it_changes_a_result(family: str, tmp_path: Path) -> None:
    """As of files of text (`test_odd_metadata.py`)."""
    one = FAMILIES[family]
    model = made(one)
    file = write_model(tmp_path, one, model)
    read = GgufModel.read(file, print)
    projector = projector_beside(file, read.metadata)
    assert projector is not None
    plain, values = projector.metadata, projector.metadata._values

    def outcome(changed: Values) -> str:
        prefixed = {f"clip.{key}": value for key, value in changed.items()}
        lists = {key: value for key, value in prefixed.items() if isinstance(value, tuple | None)}
        header = GgufHeader({"general.architecture": "clip"} | prefixed, lists, {}, ())
        try:
            metadata = Metadata(header, list(plain.tensors.values()))
            encoder = projector.encoder.of_file(metadata)
            text = ModelConfig.of(read.config.get_text_config().to_dict())
            config, settings = make_composite(encoder, metadata, text, read.metadata)
        except ModelError as error:
            return f"refused: {error.message}".replace("\n", "of two lines")
        return f"{config.to_dict()} {settings.images} {settings.settings} {encoder.sources}"

    for key, number in values.items():
        without = outcome({name: value for name, value in values.items() if name != key})
        usual = [outcome(values | {key: other}) for other in (number, 2 * number)]
        depends = len({without, *usual}) > 1 or without.startswith("refused")
        if isinstance(number, int | float):
            blocks = int(values["vision.block_count"])
            listed = outcome(values | {key: (number,) * blocks})
            assert listed == usual[0] or key == "vision.block_count", key
        for odd in ODD:
            said = outcome(values | {key: odd})
            is_refused = said.startswith("refused")
            assert is_refused or not depends or said not in {without, usual[0]}, (key, odd)
            assert not is_refused or "two lines" not in said, (key, odd, said)
