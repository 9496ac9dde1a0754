"""The tokenizer of a model folder, with the same tokens as transformers' `AutoTokenizer`, without importing
transformers.

`tokenizer.json` describes it. But transformers chooses a class for the folder, and some classes replace the
normalisation, cutting and decoding of the file; the classes of most decoders are here (`_REBUILT`).
`tokenizer_config.json` adds tokens. transformers itself makes unknown tokenizers, and refuses bad files.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from tokenizers import AddedToken, Regex, decoders, models, normalizers
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers as cuts

from diskprefix.errors import ModelError
from diskprefix.printable import first_line
from diskprefix.runtime.files.lfs_pointer import fault_or_pointer
from diskprefix.runtime.files.tokenizer import Tokenizer, set_ends

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger("diskprefix")

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_AS_IN_FILE = frozenset({"TokenizersBackend", "PreTrainedTokenizer", "PythonBackend"})
"""Classes that replace nothing."""
_EXTRA = "extra_special_tokens"
_TYPES_AS_IN_FILE = """
    aria beam bigbird_pegasus ernie4_5 ernie4_5_moe flex_olmo fuyu glm glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe
    glmasr got_ocr2 gpt_bigcode granite granitemoe granitemoehybrid granitemoeshared hyperclovax internlm3 iquestcoder
    jamba kimi_k25 kimi_linear kosmos-2 llava llava_next mimo_v2_flash minicpm3 minicpm_ocr minicpmv4_6 minicpmv4_7
    minimax_m2 ministral ministral3 mistral mistral3 mistral_large4 mixtral modernbert-decoder molmo2 nemo_speechlm
    nemotron olmo2 olmo3 olmo_hybrid paddleocr_vl persimmon phi3 phimoe pix2struct smolvlm stablelm vipllava voxtral
    voxtral_realtime xlm-roberta-xl
"""
"""Types of models whose folders have no other class, whatever they name (`TOKENIZER_MAPPING_NAMES`)."""
_TYPES_OF_ONE_CLASS = {
    "qwen2": "Qwen2Tokenizer",
    "hyperclovax_vision_v2": "GPT2Tokenizer",
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp"), "Qwen3_5Tokenizer"),
}
"""Types whose folders have this class, whatever they name (`MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS`)."""
_UNREAD = ("auto_map", "fast_tokenizer_files", "fix_mistral_regex")
"""Settings that only transformers follows."""
_CLEANS_BPE = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
_Token: TypeAlias = str | AddedToken


class _Unknown(Exception):
    """Nothing here knows how transformers makes the tokenizer of a folder."""


class _Steps(NamedTuple):
    """The steps that a class puts in the place of the file's, and the special tokens that it has by itself."""

    normalizer: Any
    cut: Any
    decoder: Any
    special: Mapping[str, str | None]
    model: Mapping[str, Any] = {}
    """Options of the model. The others are off."""


def folder_tokenizer(folder: Path) -> Tokenizer:
    """Returns the tokenizer of a folder. Raises `ModelError`."""
    try:
        return _made(folder)
    except Exception as error:  # noqa: BLE001 (transformers decides whether the files are bad)
        log.info("transformers reads the tokenizer of %s: %s", folder, first_line(error))
    from diskprefix.runtime.imports import INSTALL, transformers_quietly

    if find_spec("transformers") is None:
        raise ModelError(f"the tokenizer of {folder} needs transformers, which is not installed: {INSTALL}")
    try:
        of_library = transformers_quietly().AutoTokenizer
        loaded = of_library.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        file = folder / "tokenizer.json"
        reason = fault_or_pointer(file, first_line(error)) if file.is_file() else "there is no tokenizer.json"
        raise ModelError(f"cannot read the tokenizer of {folder}: {reason}") from error
    if not loaded.is_fast:
        raise ModelError(f"{folder} has no fast tokenizer (tokenizer.json), which diskprefix needs")
    tokenizer = tokenizer_of_transformers(loaded)
    tokenizer.chat_template = tokenizer.chat_template or _processors_template(folder)
    return tokenizer


def tokenizer_of_transformers(loaded: PreTrainedTokenizerFast) -> Tokenizer:
    """Returns the same tokenizer as one of transformers."""
    return Tokenizer(
        loaded.backend_tokenizer,
        loaded.special_tokens_map,
        extra_special_tokens=loaded.extra_special_tokens,
        chat_template=loaded.chat_template,
        name_or_path=loaded.name_or_path,
        cleans_up=_cleans_up(loaded.backend_tokenizer, vars(loaded)),
    )


def copy_for_transformers(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Returns a copy as transformers' processors take it. They change its settings, which other threads use
    meanwhile."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        chat_template=tokenizer.chat_template,
        extra_special_tokens=tokenizer.extra_special_tokens,
        **tokenizer.special_tokens_map,
    )


def _made(folder: Path) -> Tokenizer:
    """Returns the tokenizer. Raises `_Unknown`, or anything else for bad files."""
    if not (file := folder / "tokenizer.json").is_file():
        raise _Unknown("there is no tokenizer.json")
    settings, of_model = _json(folder / "tokenizer_config.json"), _json(folder / "config.json")
    if unread := next((name for name in _UNREAD if settings.get(name)), None):
        raise _Unknown(f"it has {unread}")
    backend = Backend.from_file(str(file))
    padding = backend.padding
    named = settings.get("tokenizer_class") or of_model.get("tokenizer_class")
    class_name = _class_name(named, of_model.get("model_type"), file)
    tokens = _Tokens.of(folder, settings, backend)
    if class_name not in _AS_IN_FILE:
        if class_name not in _REBUILT:
            raise _Unknown(f"nothing here knows {class_name}")
        steps = _REBUILT[class_name](settings)
        backend, settings = _rebuilt(backend, steps), {**steps.special, **settings}
    if padding is not None:
        settings.setdefault("pad_token", padding["pad_token"])
    special = tokens.special(settings)
    tokens.add_to(backend, special)
    if backend.post_processor is None or class_name == "GPTNeoXTokenizer":
        set_ends(backend, None, None)
    _finish(class_name, backend, [*special.values(), *tokens.extra])
    backend.encode_special_tokens = bool(settings.get("split_special_tokens"))
    return Tokenizer(
        backend,
        {name: _text(token) for name, token in special.items()},
        extra_special_tokens=[_text(token) for token in tokens.extra],
        chat_template=_templates(folder, settings.get("chat_template")) or _processors_template(folder),
        name_or_path=str(folder),
        cleans_up=_cleans_up(backend, settings),
    )


def _cleans_up(backend: Backend, settings: Mapping[str, Any]) -> bool:
    is_wanted = bool(settings.get("clean_up_tokenization_spaces"))
    return is_wanted and (not isinstance(backend.model, models.BPE) or bool(settings.get(_CLEANS_BPE)))


def _class_name(named: str | None, model_type: str | None, file: Path) -> str:
    """Returns the class that transformers chooses for a folder that names one, or none. Raises `_Unknown`."""
    has_no_other = model_type in _TYPES_AS_IN_FILE.split()
    if named is None and not has_no_other:
        raise _Unknown("its files name no class")
    if model_type in _TYPES_OF_ONE_CLASS:
        return _TYPES_OF_ONE_CLASS[model_type]
    own = (named or "").removesuffix("Fast")
    # Llama 3 names the class of Llama 2. transformers sees it in the text of the file.
    if has_no_other or (own == "LlamaTokenizer" and b'"ByteLevel"' in file.read_bytes()):
        return "TokenizersBackend"
    return own


def _llama(settings: Mapping[str, Any]) -> _Steps:
    has_blank = settings.get("add_prefix_space")
    scheme = "always" if settings.get("legacy", False) else "first"
    decoded: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_blank in (None, True):
        decoded.append(decoders.Strip(" ", left=1))
    else:
        scheme = "never"
    return _Steps(
        None,
        cuts.Metaspace("▁", scheme, split=False),
        decoders.Sequence(decoded),
        {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
        {"fuse_unk": True, "byte_fallback": True},
    )


def _gemma(settings: Mapping[str, Any]) -> _Steps:
    names = ("unk", "bos", "eos", "pad", "mask")
    special = {f"{name}_token": f"<{name}>" for name in names}
    return _Steps(
        normalizers.Replace(" ", "▁"),
        cuts.Split(" ", "merged_with_previous"),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        special,
        {"fuse_unk": True, "byte_fallback": True, "unk_token": _text(settings.get("unk_token", special["unk_token"]))},
    )


def _qwen(words: str, settings: Mapping[str, Any]) -> _Steps:
    pattern = (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?{words}+|\p{{N}}"
        rf"| ?[^\s{words.strip('[]')}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    bytewise = cuts.ByteLevel(add_prefix_space=settings.get("add_prefix_space") or False, use_regex=False)
    cut = cuts.Sequence([cuts.Split(Regex(pattern), "isolated"), bytewise])
    special = dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>")
    return _Steps(normalizers.NFC(), cut, decoders.ByteLevel(), special)


def _gpt_2(settings: Mapping[str, Any]) -> _Steps:
    cut = cuts.ByteLevel(add_prefix_space=settings.get("add_prefix_space", False))
    special = {**dict.fromkeys(_NAMED[:3], "<|endoftext|>"), "pad_token": None}
    return _Steps(None, cut, decoders.ByteLevel(), special)


def _gpt_neox(settings: Mapping[str, Any]) -> _Steps:
    has_blank, trims = settings.get("add_prefix_space", False), settings.get("trim_offsets", True)
    cut = cuts.ByteLevel(add_prefix_space=has_blank, trim_offsets=trims)
    special = {**dict.fromkeys(_NAMED[:3], "<|endoftext|>"), "pad_token": "<|padding|>"}
    return _Steps(normalizers.NFC(), cut, decoders.ByteLevel(), special)


def _cohere(settings: Mapping[str, Any]) -> _Steps:
    bytewise = cuts.ByteLevel(add_prefix_space=settings.get("add_prefix_space", False))
    special = {"unk_token": "<UNK>", "bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>"}
    special |= {"pad_token": "<PAD>", "cls_token": "<CLS>", "sep_token": "<SEP>", "mask_token": "<MASK_TOKEN>"}
    cut = cuts.Sequence([cuts.Digits(individual_digits=True), bytewise])
    return _Steps(normalizers.NFC(), cut, decoders.ByteLevel(), special)


_REBUILT: Mapping[str, Callable[[Mapping[str, Any]], _Steps]] = {
    "LlamaTokenizer": _llama,
    "GemmaTokenizer": _gemma,
    "Qwen2Tokenizer": lambda settings: _qwen(r"\p{L}", settings),
    "Qwen3_5Tokenizer": lambda settings: _qwen(r"[\p{L}\p{M}]", settings),
    "GPT2Tokenizer": _gpt_2,
    "GPTNeoXTokenizer": _gpt_neox,
    "CohereTokenizer": _cohere,
}
"""The classes of transformers that replace steps of the file."""


def _rebuilt(backend: Backend, steps: _Steps) -> Backend:
    """Returns a tokenizer with the vocabulary of the file, and no added tokens yet. Raises `_Unknown`."""
    model = backend.model
    if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        raise _Unknown("its class replaces a file of another kind")
    options = {"dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    for name, value in {**options, **steps.model}.items():
        setattr(model, name, value)
    made = Backend(model)
    made.normalizer, made.pre_tokenizer, made.decoder = steps.normalizer, steps.cut, steps.decoder
    if backend.post_processor is not None:
        made.post_processor = backend.post_processor
    return made


class _Tokens(NamedTuple):
    """The special tokens in the settings of a folder, in addition to `_NAMED`."""

    added: Mapping[int, AddedToken]
    extra: Sequence[_Token]
    """Special tokens without names."""
    others: Mapping[str, _Token]
    """Special tokens with names of this model."""

    @classmethod
    def of(cls, folder: Path, settings: dict[str, Any], backend: Backend) -> _Tokens:
        """Reads the tokens. If the settings list no added tokens, completes `settings` from another file of the
        folder."""
        if "additional_special_tokens" in settings and not settings.get(_EXTRA):
            settings[_EXTRA] = settings.pop("additional_special_tokens")
        others = {name: settings.pop(name) for name in list(settings) if _is_other(name, settings[name])}
        named = settings.pop("model_specific_special_tokens", None)
        if named and not others and not isinstance(settings.get(_EXTRA), dict):
            others = {name: _token(value) for name, value in named.items()}
        added = settings.get("added_tokens_decoder")
        if added is None:
            for name, value in _json(folder / "special_tokens_map.json").items():
                if name == _EXTRA and isinstance(value, list):
                    listed = settings.get(_EXTRA) or []
                    settings[name] = [*listed, *(token for token in map(_special, value) if token not in listed)]
                else:
                    settings[name] = value if name == _EXTRA else _special(value)
        for name, value in settings.items():
            settings[name] = _token(value)
        others = {name: value for name, value in settings.items() if _is_other(name, value)} | others
        extra = settings.get(_EXTRA, settings.get("additional_special_tokens")) or []
        if isinstance(extra, dict):
            others, extra = others | {name: _token(value) for name, value in extra.items()}, []
        extra = list(map(_token, extra))
        if added is not None:
            added_tokens = {int(number): AddedToken(**token) for number, token in added.items()}
        else:
            special = {_text(token) for token in (*map(settings.get, _NAMED), *extra)}
            listed = _json(folder / "added_tokens.json").items()
            added_tokens = {
                number: AddedToken(text, normalized=text not in special, special=text in special)
                for text, number in listed
            }
            added_tokens |= backend.get_added_tokens_decoder()
        return cls(added_tokens, extra, others)

    def special(self, settings: Mapping[str, Any]) -> dict[str, _Token]:
        """Returns the special tokens by their names. Raises `TypeError` if one is no token."""
        added = {token.content: token for token in self.added.values()}
        named = {name: settings[name] for name in _NAMED if settings.get(name) is not None}
        tokens = {name: added.get(_text(token), token) for name, token in named.items()} | dict(self.others)
        if not all(isinstance(token, str | AddedToken) for token in (*tokens.values(), *self.extra)):
            raise TypeError("a special token is no text")
        return tokens

    def add_to(self, backend: Backend, special: Mapping[str, _Token]) -> None:
        """Adds the tokens of the settings in the order of their numbers, then special tokens that are none of them."""
        wanted: list[_Token] = [token for _, token in sorted(self.added.items())]
        known = {token.content for token in (*backend.get_added_tokens_decoder().values(), *self.added.values())}
        wanted += [token for token in (*special.values(), *self.extra) if _text(token) not in known]
        tokens = [AddedToken(token, special=True) if isinstance(token, str) else token for token in wanted]
        names = set(map(_text, special.values()))
        for token in tokens:
            token.special = token.special or token.content in names
        backend.add_tokens(tokens)


def _is_other(name: str, value: Any) -> bool:
    return name.endswith("_token") and name not in _NAMED and isinstance(value, str | AddedToken)


def _special(value: Any) -> Any:
    return AddedToken(**{**value, "special": True}) if isinstance(value, dict) else value


def _token(value: Any) -> Any:
    if isinstance(value, dict) and value.get("__type") == "AddedToken":
        return AddedToken(**{name: item for name, item in value.items() if name != "__type"})
    return value


def _text(token: Any) -> str:
    return token.content if isinstance(token, AddedToken) else str(token)


def _finish(class_name: str, backend: Backend, special: Sequence[_Token]) -> None:
    """Adds special tokens once more, as some classes do."""
    if class_name == "Qwen2Tokenizer":
        backend.add_tokens([AddedToken(_text(token), special=True) for token in special])
    elif class_name == "CohereTokenizer":
        tokens = [AddedToken(token, normalized=False) if isinstance(token, str) else token for token in special]
        backend.add_special_tokens(tokens)


def _templates(folder: Path, of_settings: Any) -> str | dict[str, str] | None:
    """Returns the chat template, or several by name. Template files take precedence over the settings."""
    files = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if (default := folder / "chat_template.jinja").is_file():
        files = {"default": default} | files
    templates = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    if not templates:
        if isinstance(of_settings, list):
            return {template["name"]: template["template"] for template in of_settings}
        if of_settings is not None and not isinstance(of_settings, str | dict):
            raise TypeError(f"the chat template is {type(of_settings)}")
        return of_settings
    return templates["default"] if list(templates) == ["default"] else templates


def _processors_template(folder: Path) -> str | None:
    """Returns the chat template of an older multimodal model, from a file that only processors read."""
    try:
        content = json.loads((folder / "chat_template.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    template = content.get("chat_template") if isinstance(content, dict) else None
    return template if isinstance(template, str) else None


def _json(path: Path) -> dict[str, Any]:
    """Returns the content of a file; nothing if it is missing."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return content
