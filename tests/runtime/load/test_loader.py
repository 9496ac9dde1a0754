"""Models are loaded from what users have on disk, and what cannot be loaded is refused with its reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from diskprefix.daemon.settings import Settings
from diskprefix.errors import ModelError, SettingsError
from diskprefix.model_identity import weights_digest
from diskprefix.runtime.fetch.embedded import EMBEDDED
from diskprefix.runtime.fetch.named_model import name_faster, require_named
from diskprefix.runtime.files import read_tokenizer
from diskprefix.runtime.files.chat_template import render_template
from diskprefix.runtime.files.checkpoint import tensors_in, weight_files_of
from diskprefix.runtime.files.folder_weights import FolderWeights
from diskprefix.runtime.load import loader
from diskprefix.runtime.load.loader import LoadedModel, load_model, load_tokenizer
from tests.daemon.server.picture_models import write_llava
from tests.runtime.plan import tiny
from tests.runtime.plan.hub import fake_hub
from tests.runtime.plan.plans import logits_of
from tests.runtime.plan.tensor_weights import weights_of

REPOSITORY = Path(__file__).parents[3]
MESSAGES = [{"role": "user", "content": "hello"}]
pytestmark = pytest.mark.usefixtures("cache")


def load(model: object, **settings: Any) -> LoadedModel:
    return load_model(Settings(model=str(model), **settings), lambda _: None)


def refusal(model: object, **settings: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load(model, **settings)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_a_local_folder_loads_ready_to_serve(folder: Path) -> None:
    loaded = load(folder)
    assert loaded.name == "tiny-llama"
    assert loaded.model is None
    assert loaded.device == "cpu"
    modules = loaded.read_modules()
    assert not modules.training
    assert not any(parameter.requires_grad for parameter in modules.parameters())
    assert loaded.weights_digest == weights_digest([folder / "model.safetensors"])
    assert set(loaded.timings) == {"source", "imports", "digest", "tokenizer", "weights"}
    text = render_template(loaded.tokenizer.get_chat_template(), MESSAGES, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("name", ["consolidated-00001.safetensors", "w/part-00001.safetensors"])
def test_each_file_that_the_index_names_is_in_the_digest(name: str, tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path / "m")
    file = folder / "model.safetensors"
    weights = load_file(file)
    (folder / name).parent.mkdir(exist_ok=True)
    file.rename(folder / name)
    # Nothing reads this one.
    save_file({"other": torch.zeros(4)}, folder / "model-mtp.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    before = load(folder)
    changed = {name: weight + 1 for name, weight in weights.items()}
    save_file(changed, folder / name, {"format": "pt"})
    assert load(folder).weights_digest != before.weights_digest


def test_a_loaded_model_no_longer_depends_on_its_file(folder: Path) -> None:
    loaded = load(folder)
    expected = logits_of(weights_of(tiny.llama()), loaded.config)
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(bytes((folder / "model.safetensors").stat().st_size))
    assert loaded.weights is not None
    assert torch.equal(logits_of(loaded.weights, loaded.config), expected)


def test_tied_weights_stay_one_tensor(tmp_path: Path) -> None:
    loaded = load(tiny.write_folder(tmp_path / "m", tie_word_embeddings=True))
    assert loaded.weights is not None
    assert not loaded.weights.has_parameter("lm_head.weight")
    model: Any = loaded.read_modules()
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize(
    ("model", "settings", "name"),
    [
        ("~/tiny-llama", {}, "tiny-llama"),
        ("tiny-llama", {}, "tiny-llama"),
        ("./tiny-llama", {"served_model_name": "assistant"}, "assistant"),
    ],
)
def test_a_folder_is_found_by_any_path_to_it_and_served_by_its_name_or_the_chosen_one(
    model: str, settings: dict[str, str], name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.chdir(folder.parent)
    assert load(model, **settings).name == name


@pytest.mark.parametrize("own", ["bfloat16", "float16", "float32", None])
def test_the_dtype_is_the_models_own_unless_another_is_chosen(own: str | None, tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path / "m", dtype=getattr(torch, own or "float32"))
    edit_config(folder, dtype=own)
    assert load(folder).dtype == (own or "float32")
    assert load(folder, dtype="float16").dtype == "float16"


def test_weights_in_several_files_are_one_model(tmp_path: Path, folder: Path) -> None:
    tiny.llama().save_pretrained(tmp_path / "m", max_shard_size="40KB")
    tiny.tokenizer().save_pretrained(tmp_path / "m")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 1
    found, expected = (load(one) for one in (tmp_path / "m", folder))
    assert found.weights is not None
    assert expected.weights is not None
    assert torch.equal(logits_of(found.weights, found.config), logits_of(expected.weights, expected.config))


def test_loading_prints_nothing(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"model.unexpected": torch.zeros(1)}, folder / "model.safetensors", {"format": "pt"})
    load(folder)
    assert capfd.readouterr() == ("", "")


def test_a_missing_path_is_refused_and_digests_are_computed_without_torch() -> None:
    code = (
        "import sys, diskprefix.runtime.load.fingerprint\n"
        "from diskprefix.runtime.load.loader import load_model\nfrom diskprefix.daemon.settings import Settings\n"
        "try: load_model(Settings(model='/nope'), print)\n"
        "except Exception as error: print(type(error).__name__, 'torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert answer.stdout == "ModelError False\n"


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def drop_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def reshape_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.zeros(7)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def cut_weights(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])


def only_adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


def only_gguf(folder: Path) -> None:
    (folder / "config.json").rename(folder / "m.gguf")


def missing_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def shard_elsewhere(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
    index = {"weight_map": {"a": "../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def drop_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def change_header(folder: Path, change: Callable[[bytes], bytes]) -> None:
    """Rewrites the header of the weights, which is JSON."""
    file = folder / "model.safetensors"
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = change(content[8:end])
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])


def entry_with(**fields: Any) -> Callable[[Path], None]:
    """Returns what changes the first tensor of the header."""

    def change(header: bytes) -> bytes:
        entries = json.loads(header)
        next(entry for name, entry in entries.items() if name != "__metadata__").update(fields)
        return json.dumps(entries).encode()

    return lambda folder: change_header(folder, change)


DEFECTS: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    (shard_elsewhere, "model.safetensors.index.json is damaged"),
    (only_adapter, "holds an adapter: give the folder of the merged model"),
    (only_gguf, "m.gguf: it does not begin with GGUF"),
    (lambda folder: (folder / "model.safetensors").unlink(), "holds no weights"),
    (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        "convert them to safetensors",
    ),
    (missing_shard, "lacks 1 of 2 weight files, for example model-00002-of-00002.safetensors"),
    (lambda folder: (folder / "model.safetensors.index.json").write_text("[]"), "index.json is damaged"),
    (lambda folder: (folder / "config.json").write_text("{"), "cannot read the configuration"),
    (lambda folder: (folder / "config.json").write_text("{}"), "cannot read the configuration"),
    (lambda folder: edit_config(folder, model_type="of-tomorrow"), "cannot read the configuration"),
    (
        lambda folder: edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4}),
        "weights quantised with gptq are not served; take a .gguf file of the model",
    ),
    (cut_weights, "model.safetensors is damaged or cut short"),
    (entry_with(data_offsets=[-8, 8]), "model.safetensors is damaged or cut short"),
    (entry_with(data_offsets=[64, 0]), "model.safetensors is damaged or cut short"),
    (entry_with(data_offsets=[0, 10**12]), "model.safetensors is damaged or cut short"),
    (entry_with(data_offsets=["0", "8"]), "model.safetensors is damaged or cut short"),
    (entry_with(shape=[float("inf")]), "model.safetensors is damaged or cut short"),
    (entry_with(shape=[2**62] * 3), "model.safetensors is damaged or cut short"),
    (entry_with(shape=None), "model.safetensors is damaged or cut short"),
    (entry_with(dtype="F999"), "model.safetensors is damaged or cut short"),
    (lambda folder: change_header(folder, lambda _: b'{"a":' * 20_000 + b"1" + b"}" * 20_000), "damaged or cut short"),
    (lambda folder: change_header(folder, lambda _: b"[1]"), "model.safetensors is damaged or cut short"),
    (lambda folder: (folder / "config.json").write_text('{"a":' * 20_000 + "1" + "}" * 20_000), "recursion"),
    (drop_tensor, "tiny-llama lacks layers.1.mlp.up_proj.weight"),
    (reshape_tensor, "(a norm of 7 numbers, of rows of 32): "),
    (drop_tokenizer, "there is no tokenizer.json"),
    (lambda folder: (folder / "tokenizer.json").write_text("{"), "cannot read the tokenizer"),
]


@pytest.mark.parametrize(("defect", "words"), DEFECTS)
def test_a_defective_folder_is_refused_with_the_reason(
    defect: Callable[[Path], object], words: str, folder: Path
) -> None:
    defect(folder)
    message = refusal(folder)
    assert words in message
    assert str(folder) in message


def entries_of(count: int) -> dict[str, Any]:
    """Returns a header of tensors a, b, … that have 8 bytes each."""
    return {chr(97 + i): {"dtype": "F32", "shape": [2], "data_offsets": [8 * i, 8 * i + 8]} for i in range(count)}


LAYOUTS: dict[str, tuple[dict[str, Any], int, str]] = {
    "the same bytes": (entries_of(2) | {"c": entries_of(2)["b"]}, 16, "c has 8 bytes and lies at 8 to 16"),
    "an overlap": (entries_of(2) | {"c": entries_of(1)["a"] | {"data_offsets": [12, 20]}}, 20, "c has 8 bytes"),
    "within another": (entries_of(1) | {"b": {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]}}, 8, "b has 2 "),
    "a hole": (entries_of(1) | {"c": entries_of(3)["c"]}, 24, "c has 8 bytes and lies at 16 to 24"),
    "a hole before the first": ({"b": entries_of(2)["b"]}, 16, "b has 8 bytes"),
    "bytes behind the last": (entries_of(2), 24, "its tensors end at 16, the file at 24"),
    "beyond the end": (entries_of(3), 20, "c has 8 bytes and lies at 16 to 24"),
    "fewer bytes than numbers": ({"a": entries_of(1)["a"] | {"shape": [3]}}, 8, "a has 12 bytes and lies at 0 to 8"),
    "backwards": ({"a": entries_of(1)["a"] | {"data_offsets": [8, 0]}}, 8, "a has 8 bytes"),
    "half a byte": ({"a": entries_of(1)["a"] | {"data_offsets": [0.5, 8.5]}}, 9, "int"),
    "half a row": ({"a": entries_of(1)["a"] | {"shape": [2.5]}}, 8, "int"),
    "a number as text": ({"a": entries_of(1)["a"] | {"shape": ["2"]}}, 8, "int"),
    "less than nothing": ({"a": entries_of(1)["a"] | {"shape": [-1, -2]}}, 8, "int"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_that_do_not_fill_their_file_are_refused_as_the_library_does(layout: str, tmp_path: Path) -> None:
    entries, num_bytes, words = LAYOUTS[layout]
    file, header = tmp_path / "model.safetensors", json.dumps(entries).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(num_bytes))
    with pytest.raises(ModelError, match=rf"model\.safetensors is damaged or cut short \(.*{words}"):
        tensors_in(file)
    with pytest.raises(SafetensorError), safe_open(file, "np"):
        pass


def test_a_tensor_that_two_files_of_a_folder_hold_is_refused_by_name(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    first = min(weights)
    save_file(weights, folder / "model-00001-of-00002.safetensors")
    save_file({first: weights[first] + 1}, folder / "model-00002-of-00002.safetensors")
    said = f"model-00002-of-00002.safetensors and model-00001-of-00002.safetensors both hold {first}: they are not one"
    assert said in refusal(folder)


class Panic(BaseException):
    """Of a library in another language: none of `Exception`."""


def test_a_tokenizer_in_whose_library_something_panics_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(str(folder), None, lambda _: None)

    class Backend:
        def encode_batch(self, *_: Any, **__: Any) -> Any:
            raise Panic("no entry found for key")

    monkeypatch.setattr(tokenizer, "backend_for", lambda _texts: Backend())
    monkeypatch.setattr(read_tokenizer, "folder_tokenizer", lambda _: tokenizer)
    with pytest.raises(ModelError, match=r"the tokenizer of .* cannot be used: no entry found for key"):
        read_tokenizer.read_tokenizer(folder, None)


def test_code_from_a_model_folder_is_never_run(folder: Path, tmp_path: Path) -> None:
    trap = tmp_path / "it-ran"
    (folder / "modeling_evil.py").write_text(f"open({str(trap)!r}, 'w')\n")
    names = {
        "AutoConfig": "modeling_evil.C",
        "AutoModelForCausalLM": "modeling_evil.M",
        "AutoTokenizer": "modeling_evil.T",
    }
    edit_config(folder, model_type="evil", auto_map=names)
    assert "code of its own, which diskprefix does not run" in refusal(folder)
    assert not trap.exists()


_T5 = {"vocab_size": 64, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
_ENCODER = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_ENCODER |= {"intermediate_size": 16, "pad_token_id": 0}
_DECODER = _ENCODER | {"num_key_value_heads": 2, "head_dim": 8}


@pytest.mark.parametrize(
    ("architecture", "config", "sizes", "kind"),
    [
        ("T5ForConditionalGeneration", "T5Config", _T5, "an encoder–decoder model"),
        ("T5EncoderModel", "T5Config", _T5, "an embedding model"),
        ("BertModel", "BertConfig", _ENCODER, "an embedding model"),
        ("LlamaModel", "LlamaConfig", _DECODER, "an embedding model"),
        ("BertForMaskedLM", "BertConfig", _ENCODER, "not a decoder model"),
        ("LlamaForSequenceClassification", "LlamaConfig", _DECODER, "not a decoder model"),
    ],
)
def test_a_model_of_another_kind_is_refused_by_the_name_of_its_kind(
    architecture: str, config: str, sizes: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    model = getattr(transformers, architecture)(getattr(transformers, config)(**sizes))
    model.save_pretrained(tmp_path / "m")
    verb = "is" if kind.startswith("not ") else "holds"
    assert refusal(tmp_path / "m") == (
        f"{tmp_path / 'm'} {verb} {kind}: {architecture}; diskprefix serves decoder models that generate text"
    )


@pytest.mark.parametrize(
    ("config", "words"),
    [
        # As GTE-Qwen2 and EmbeddingGemma are published.
        ({"is_causal": False}, "holds a model whose tokens see later ones: LlamaForCausalLM"),
        ({"use_bidirectional_attention": True}, "holds a model whose tokens see later ones: LlamaForCausalLM"),
        (
            {"model_type": "diffusion_gemma", "architectures": ["DiffusionGemmaForBlockDiffusion"]},
            "is not a decoder that generates text",
        ),
        ({"model_type": "vit", "architectures": ["OfTomorrow"]}, "is not a decoder model"),
    ],
    ids=str,
)
def test_models_that_are_not_causal_decoders_are_refused(config: dict[str, Any], words: str, folder: Path) -> None:
    own = json.loads((folder / "config.json").read_text()) if "model_type" not in config else {}
    (folder / "config.json").write_text(json.dumps(own | config))
    assert words in refusal(folder)


def test_a_model_that_does_not_fit_is_refused_before_loading_with_both_figures(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "available_bytes", lambda _: 4096)
    monkeypatch.setattr(loader._ModelSource, "decoder_weights", None)
    message = refusal(folder, dtype="float32")
    assert message.startswith("tiny-llama as float32 on cpu does not fit: about ")
    assert "of memory needed (weights in float32 " in message
    assert "4.0 KiB available; free some" in message


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.\n"),
    ],
)
def test_memory_that_runs_out_while_loading_is_one_line(
    error: Exception, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(FolderWeights, "_read_tensor", fail)
    assert "tiny-llama does not fit in memory" in refusal(folder)


def set_devices(monkeypatch: pytest.MonkeyPatch, cuda: int = 0, xpu: int = 0, mps: int = 0) -> None:
    for module, count in ((torch.cuda, cuda), (torch.xpu, xpu)):
        monkeypatch.setattr(module, "is_available", lambda count=count: count > 0)
        monkeypatch.setattr(module, "device_count", lambda count=count: count)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps > 0)


@pytest.mark.parametrize(
    ("name", "present", "expected"),
    [
        ("auto", {}, "cpu"),
        ("auto", {"mps": 1}, "mps"),
        ("auto", {"xpu": 2, "mps": 1}, "xpu:0"),
        ("auto", {"cuda": 2}, "cuda:0"),
        ("cpu", {"cuda": 2, "mps": 1}, "cpu"),
        ("cuda", {"cuda": 2}, "cuda:0"),
        ("cuda:1", {"cuda": 2}, "cuda:1"),
        ("xpu:1", {"xpu": 2, "mps": 1}, "xpu:1"),
        ("mps", {"cuda": 1, "mps": 1}, "mps"),
    ],
)
def test_the_best_device_is_found(
    name: str, present: dict[str, int], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_devices(monkeypatch, **present)
    monkeypatch.setattr(loader, "_may_have_gpus", lambda: True)
    assert loader.pick_device(name) == expected


UNKNOWN = dict.fromkeys(
    ["gpu", "cuda:", "cuda:x", "cuda:-1", "CPU", "", "cpu:0", "cuda:1 "], ".* auto, cpu, cuda, cuda:N"
)
ABSENT = {name: f"there is no {name}" for name in ("cuda:2", "xpu", "mps")}


@pytest.mark.parametrize(("device", "words"), (UNKNOWN | ABSENT).items())
def test_a_device_that_is_not_there_is_refused_with_its_param(
    device: str, words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_devices(monkeypatch, cuda=2)
    with pytest.raises(SettingsError, match=f"^--device: {words}"):
        load(folder, device=device)


def test_a_type_of_keys_and_values_is_refused_without_a_plan(folder: Path) -> None:
    with pytest.raises(SettingsError, match=r"^--kv-type q8 is for models with a plan, this one has none: .*float16$"):
        load(folder, dtype="float16", kv_type="q8")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot read"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"ok\n{% for m in messages %}", "line 2"),
        (b"{{ x | no_such_filter }}", "no_such_filter"),
    ],
)
def test_an_unusable_chat_template_is_refused_with_its_param(
    content: bytes | None, words: str, folder: Path, tmp_path: Path
) -> None:
    template = tmp_path / "chat.jinja"
    if content is not None:
        template.write_bytes(content)
    with pytest.raises(SettingsError, match=words) as caught:
        load(folder, chat_template=template)
    assert caught.value.message.startswith("--chat-template: ")
    assert "\n" not in caught.value.message


def test_a_chat_template_file_overrides_the_models_and_a_tokenizer_needs_no_weights(
    folder: Path, tmp_path: Path
) -> None:
    template = tmp_path / "template.jinja"
    # One that refuses the messages of a test is kept.
    template.write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('') }}{% endif %}{{ messages[0].role }}!"
    )
    assert render_template(load(folder, chat_template=template).tokenizer.get_chat_template(), MESSAGES) == "user!"
    (folder / "model.safetensors").unlink()
    for chosen, text in ((None, "<|im_start|>user\nhello<|im_end|>\n"), (template, "user!")):
        tokenizer = load_tokenizer(str(folder), chosen, lambda _: None)
        assert render_template(tokenizer.get_chat_template(), MESSAGES) == text
    with pytest.raises(ModelError, match="no such file or folder"):
        load_tokenizer(str(tmp_path / "nowhere"), None, lambda _: None)
    with pytest.raises(SettingsError, match="--chat-template: cannot read"):
        load_tokenizer(str(folder), tmp_path / "nowhere.jinja", lambda _: None)


# What --model names is looked at before anything slow, and what is near is named.


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tiny.write_folder(tmp_path / "Tiny-Chat")
    (tmp_path / "tiny-q4_0.gguf").write_bytes(b"GGUF" + (3).to_bytes(20, "little"))
    (tmp_path / "tiny-q4_1.txt").touch()
    return tmp_path


@pytest.mark.parametrize("name", ["Tiny-Chat", "tiny-q4_0.gguf", "org/unknown", "org/unknown:Q4_0", EMBEDDED.name])
def test_a_model_name_that_may_exist_is_not_refused(name: str, here: Path) -> None:
    require_named(name, "--model", with_weights=True)
    require_named(str(here / "Tiny-Chat"), "--model", with_weights=True)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tiny-chat2", "; the nearest is Tiny-Chat"),
        ("./tiny-q4_1.gguf", "; the nearest is ./tiny-q4_0.gguf"),
        ("tiny-q4_1.gguf", "; the nearest is tiny-q4_0.gguf"),
        ("HERE/tiny-q4.gguf", "; the nearest is HERE/tiny-q4_0.gguf"),
        (EMBEDDED.name[:-1], f"; the nearest is {EMBEDDED.name}"),
        ("HERE/tiny-q4_1.txt", "give the folder that holds the model, or a .gguf file"),
        ("something-else", "`diskprefix list --available` lists the short names"),
        *(
            (name, f"no such file or folder: {name!r}")
            for name in ("./nope", "../nope", "/not/there", "~/nope-such/x", "~nobody-here/x", "a/b.GGUF", "", " ")
        ),
    ],
)
def test_the_refusal_of_an_unknown_name_suggests_the_nearest(name: str, words: str, here: Path) -> None:
    with pytest.raises(ModelError) as caught:
        require_named(name.replace("HERE", str(here)), "--draft-model", with_weights=True)
    assert caught.value.message.startswith("--draft-model: ")
    assert caught.value.message.endswith(words.replace("HERE", str(here)))


def test_a_folder_says_which_smaller_file_in_it_is_faster(here: Path) -> None:
    folder, lines = here / "Tiny-Chat", list[str]()
    files = weight_files_of(folder)
    name_faster(folder, files, lines.append)
    assert not lines, "there is none"
    for name, size in (
        ("mmproj-F16.gguf", 3),
        ("b-00001-of-00002.gguf", 3),
        ("b-00002-of-00002.gguf", 2),
        ("a.gguf", 4),
    ):
        (folder / name).write_bytes(bytes(size))
    (folder / "large.gguf").write_bytes(bytes(1 + files[0].stat().st_size))
    name_faster(folder, files, lines.append)
    (line,) = lines
    assert line.endswith(f"--model {folder}/b-00001-of-00002.gguf")


# Models of a hub.


@pytest.fixture
def hub_cache(tmp_path: Path) -> Path:
    return tmp_path / "hub"


def test_a_hub_id_is_fetched_once_and_served_from_the_hubs_cache_when_it_is_down(
    folder: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.safetensors").write_bytes(b"a copy in another format")
    (folder / "pytorch_model.bin").write_bytes(b"the same weights, pickled")
    (folder / "consolidated.safetensors").write_bytes(b"the same weights, by other names")
    with fake_hub(hub_cache, monkeypatch) as hub:
        hub.repos["org/tiny"] = folder
        online = load("org/tiny")
        assert hub.fetched() == sorted(["model.safetensors", *(path.name for path in folder.glob("*.j*"))])
        hub.sent.clear()
        load("org/tiny")
        assert hub.fetched() == []
    offline = load("org/tiny")
    assert online.name == offline.name == "org/tiny"
    assert online.weights_digest == offline.weights_digest == load(folder).weights_digest
    assert capfd.readouterr().err == ""


def test_the_error_of_an_unreachable_hub_says_what_to_do(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_hub(hub_cache, monkeypatch):
        pass
    message = refusal("org/tiny")
    assert message.startswith("cannot fetch 'org/tiny' from the hub: the hub cannot be reached")
    ways_out = ("check the network", "HF_ENDPOINT=URL", f"diskprefix serve --model {EMBEDDED.name}", "by its path")
    assert [way for way in ways_out if way not in message] == []


def test_a_tokenizer_is_fetched_without_the_weights(
    folder: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_hub(hub_cache, monkeypatch) as hub:
        hub.repos["org/tiny"] = folder
        tokenizer = load_tokenizer("org/tiny", None, lambda _: None)
        assert tokenizer.chat_template
        assert hub.fetched() == sorted(path.name for path in folder.glob("*.j*"))
        hub.sent.clear()
        assert load("org/tiny").name == "org/tiny"
        assert hub.fetched() == ["model.safetensors"], "what is there is not fetched again"


# Where torch and transformers are not installed.

LOADS = """
import sys
from diskprefix.errors import ModelError
from diskprefix.runtime.load.loader import load_model
from diskprefix.daemon.settings import Settings
for model, dtype in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        loaded = load_model(Settings(model=model, dtype=dtype), lambda _: None)
        print("loaded", loaded.config.model_type, loaded.processor and loaded.processor.problem)
    except ModelError as error:
        print(error)
"""
INSTALL = f"{sys.executable} -m pip install 'torch<2.14' 'transformers<5.25' accelerate"


def test_without_torch_a_model_of_the_grid_says_what_to_install_and_one_with_pictures_is_of_text(
    folder: Path, tmp_path: Path
) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    for place in (Path(one) for one in sys.path if one.endswith("-packages")):
        for one in place.iterdir():
            if not one.name.startswith(("torch", "transformers", "accelerate")) and not (packages / one.name).exists():
                (packages / one.name).symlink_to(one)
    (other := tmp_path / "other").mkdir()
    for file in folder.iterdir():
        (other / file.name).symlink_to(file)
    (other / "config.json").unlink()
    (other / "config.json").write_text('{"model_type": "jamba"}')
    unknown = tiny.write_folder(tmp_path / "unknown")
    (unknown / "tokenizer_config.json").write_text('{"tokenizer_class": "CodeLlamaTokenizer"}')
    file, pictured = tiny.write_gguf(tmp_path / "tiny.gguf"), write_llava(tmp_path / "pictured")
    asked = [(folder, "auto"), (file, "auto"), (pictured, "auto"), (folder, "float16"), (file, "float16")]
    asked += [(other, "auto"), (unknown, "auto")]
    command = [sys.executable, "-S", "-c", LOADS, *(str(word) for one in asked for word in one)]
    environment = os.environ | {"PYTHONPATH": f"{packages}:{REPOSITORY}"}
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines = answer.stdout.splitlines()
    assert len(lines) == len(asked), answer.stderr
    assert lines[:2] == ["loaded llama None"] * 2
    assert lines[2] == f"loaded llava pictures need what is not installed: {INSTALL}"
    assert all(INSTALL in line for line in lines[3:]), lines


def test_a_library_that_is_not_installed_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.write_folder(tmp_path / "m")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"^serving .* needs transformers, which is not installed: .*pip install "):
        load(folder, runtime="grid")
