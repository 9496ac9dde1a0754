"""Models are loaded from what users have on disk, and what cannot be loaded is refused with its reason."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from diskprefix.errors import ModelError, SettingsError
from diskprefix.model.load import loader, tokenizer
from diskprefix.model.load.fingerprint import weights_digest
from diskprefix.model.load.loader import LoadedModel, load_model, load_tokenizer
from diskprefix.settings import Settings
from tests.model import tiny

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
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.model.device == torch.device("cpu")
    assert loaded.weights_digest == weights_digest([folder / "model.safetensors"])
    assert set(loaded.timings) == {"source", "imports", "quantising", "digest", "tokenizer", "weights"}
    text = loaded.tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_a_spare_has_read_the_tokenizer_unless_a_file_was_written_since(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, read = tokenizer._read, list[Path]()

    def reading(folder: Path, template: str | None) -> Any:
        read.append(folder)
        return own(folder, template)

    monkeypatch.setattr(tokenizer, "_read", reading)
    loader.import_model(Settings(model=str(folder)))
    assert load(folder).tokenizer("hello") == load_tokenizer(str(folder), None, lambda _: None)("hello")
    assert len(read) == 2, "that of the spare, and that which it is compared with"
    loader.import_model(Settings(model=str(folder)))
    (folder / "tokenizer_config.json").write_bytes((folder / "tokenizer_config.json").read_bytes() + b"\n")
    load(folder)
    assert len(read) == 4


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
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(bytes((folder / "model.safetensors").stat().st_size))
    ids = torch.arange(40).reshape(1, -1)
    with torch.inference_mode():
        assert torch.equal(loaded.model(ids).logits, tiny.llama()(ids).logits)


def test_tied_weights_stay_one_tensor(tmp_path: Path) -> None:
    model = load(tiny.write_folder(tmp_path / "m", tie_word_embeddings=True)).model
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
    assert load(folder).model.dtype is getattr(torch, own or "float32")
    assert load(folder, dtype="float16").model.dtype is torch.float16


def test_weights_in_several_files_are_one_model(tmp_path: Path, folder: Path) -> None:
    tiny.llama().save_pretrained(tmp_path / "m", max_shard_size="40KB")
    tiny.tokenizer().save_pretrained(tmp_path / "m")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 1
    ids = torch.arange(9).reshape(1, -1)
    with torch.inference_mode():
        assert torch.equal(load(tmp_path / "m").model(ids).logits, load(folder).model(ids).logits)


def test_loading_prints_nothing(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"model.unexpected": torch.zeros(1)}, folder / "model.safetensors", {"format": "pt"})
    load(folder)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "name", ["./nope", "../nope", "/nope", "~/nope", "~nobody-here/x", "nope.gguf", "a/b.GGUF", "", " "]
)
def test_a_path_that_does_not_exist_is_named(name: str) -> None:
    assert f"no such file or folder: {name!r}" in refusal(name)


def test_a_missing_path_is_refused_without_loading_torch() -> None:
    code = (
        "import sys\nfrom diskprefix.model.load.loader import load_model\nfrom diskprefix.settings import Settings\n"
        "try: load_model(Settings(model='/nope'), print)\n"
        "except Exception as error: print(type(error).__name__, 'torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert answer.stdout == "ModelError False\n"


def test_a_file_that_is_no_model_is_refused(folder: Path) -> None:
    assert "is a file; give the folder" in refusal(folder / "model.safetensors")


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


def drop_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


DEFECTS: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    (only_adapter, "holds an adapter: give the folder of the merged model"),
    (only_gguf, "to serve m.gguf, give the path of that file"),
    (lambda folder: (folder / "model.safetensors").unlink(), "holds no weights"),
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
    (drop_tensor, "lack 1 tensors of the model, for example model.layers.1.mlp.up_proj.weight"),
    (reshape_tensor, "do not match its config.json: model.norm.weight is (7,), not (32,)"),
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
def test_what_is_no_causal_decoder_is_refused(config: dict[str, Any], words: str, folder: Path) -> None:
    own = json.loads((folder / "config.json").read_text()) if "model_type" not in config else {}
    (folder / "config.json").write_text(json.dumps(own | config))
    assert words in refusal(folder)


def test_a_model_that_does_not_fit_is_refused_before_loading_with_both_figures(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "available_bytes", lambda _: 4096)
    monkeypatch.setattr(loader, "_read_model", None)
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

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    assert "tiny-llama does not fit in memory" in refusal(folder)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:-1", "CPU", "", "cpu:0", "cuda:1 "])
def test_an_unknown_device_is_refused_with_its_param(device: str) -> None:
    with pytest.raises(SettingsError, match=r"^--device: .* auto, cpu, cuda, cuda:N, xpu, mps"):
        load("./nope", device=device)


@pytest.mark.parametrize(("device", "num_cuda"), [("cuda", 0), ("cuda:0", 0), ("cuda:2", 2), ("xpu", 2), ("mps", 0)])
def test_an_absent_device_is_refused_with_its_param(
    device: str, num_cuda: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_devices(monkeypatch, num_cuda=num_cuda, mps=False)
    with pytest.raises(SettingsError, match=f"^--device: there is no {device}"):
        load(folder, device=device)


@pytest.mark.parametrize(
    ("name", "num_cuda", "mps", "expected"),
    [
        ("auto", 0, False, "cpu"),
        ("auto", 0, True, "mps"),
        ("auto", 2, False, "cuda:0"),
        ("cpu", 2, True, "cpu"),
        ("cuda", 2, False, "cuda:0"),
        ("cuda:1", 2, False, "cuda:1"),
        ("mps", 1, True, "mps"),
    ],
)
def test_the_best_device_is_found(
    name: str, num_cuda: int, mps: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_devices(monkeypatch, num_cuda=num_cuda, mps=mps)
    assert loader.pick_device(name) == torch.device(expected)


def test_a_gpu_of_intel_is_found_before_one_of_apple(monkeypatch: pytest.MonkeyPatch) -> None:
    set_devices(monkeypatch, num_cuda=0, mps=True)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)
    assert (loader.pick_device("auto"), loader.pick_device("xpu:1")) == (torch.device("xpu:0"), torch.device("xpu:1"))


def set_devices(monkeypatch: pytest.MonkeyPatch, *, num_cuda: int, mps: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_cuda > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)


def test_a_chat_template_file_overrides_the_models(folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}")
    loaded = load(folder, chat_template=template)
    assert loaded.tokenizer.apply_chat_template(MESSAGES, tokenize=False) == "[user] hello"


def test_a_chat_template_that_wants_other_messages_is_kept(folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}")
    assert "system first" in str(load(folder, chat_template=template).tokenizer.chat_template)


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


def test_a_tokenizer_needs_no_weights(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}!")
    for chosen, text in ((None, "<|im_start|>user\nhello<|im_end|>\n"), (template, "hello!")):
        tokenizer = load_tokenizer(str(folder), chosen, lambda _: None)
        assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == text
    with pytest.raises(ModelError, match="no such file or folder"):
        load_tokenizer(str(tmp_path / "nowhere"), None, lambda _: None)
    with pytest.raises(SettingsError, match="--chat-template: cannot read"):
        load_tokenizer(str(folder), tmp_path / "nowhere.jinja", lambda _: None)
