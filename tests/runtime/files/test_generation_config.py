"""What a model's files say of generation: each key that transformers, vLLM or llama.cpp obey is obeyed, or there is a
reason why not."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import GenerationConfig

from diskprefix.errors import ModelError
from diskprefix.runtime.fetch.recommended_sampling import OF_FILES, OF_FOLDERS, OF_OLLAMA
from diskprefix.runtime.files.generation_config import WITHOUT_EFFECT, reply_tokens
from tests.cache_folder import USERS
from tests.runtime.plan import tiny

OBEYED = {"eos_token_id", "suppress_tokens", *OF_FOLDERS}
HARMLESS = {
    # False where the makers wrote no sampling: no server that takes requests obeys it.
    "do_sample",
    # Limits, and what a call returns: a request says both.
    *("max_new_tokens", "max_length", "max_time", "num_return_sequences", "return_dict_in_generate"),
    *("output_attentions", "output_hidden_states", "output_logits", "output_scores"),
    # How transformers computes, which changes no token.
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "compile_config", "disable_compile"),
    *("continuous_batching_config", "low_memory", "prefill_chunk_size", "renormalize_logits", "remove_invalid_values"),
    # Guesses, which change no token.
    *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind"),
    *("target_lookbehind", "assistant_ensemble_weight", "speculation_type", "use_mtp"),
    # The tokenizer has them, and no reply does.
    *("bos_token_id", "pad_token_id"),
    # Only models with an encoder have them, which are not served.
    *("decoder_start_token_id", "encoder_repetition_penalty", "encoder_no_repeat_ngram_size"),
    # They mean something only beside `num_beams`.
    *("early_stopping", "length_penalty", "diversity_penalty", "num_beam_groups"),
    # Where the file came from.
    *("_from_model_config", "transformers_version"),
}
OF_TOKENIZERS = {
    # Obeyed.
    *("model", "pre", "tokens", "token_type", "scores", "merges", "bos_token_id", "eos_token_id", "eot_token_id"),
    *("eom_token_id", "unknown_token_id", "padding_token_id", "add_bos_token", "add_eos_token", "add_space_prefix"),
    "suppress_tokens",
    # Of encoders and of kinds of vocabularies that are not read.
    *("token_type_count", "seperator_token_id", "mask_token_id", "add_sep_token", "remove_extra_whitespaces"),
    *("precompiled_charsmap", "normalizer.lowercase", "normalizer.strip_accents"),
    # Tokens to fill in text, which are found by their texts.
    *("fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id", "fim_pad_token_id", "fim_rep_token_id"),
    *("fim_sep_token_id", "prefix_token_id", "suffix_token_id", "middle_token_id"),
}
SAMPLING = {
    *OF_FILES,
    # Samplers and an order of them that are not here. `show` names the keys.
    *("sequence", "xtc_probability", "xtc_threshold", "mirostat", "mirostat_tau", "mirostat_eta"),
    # A penalty counts the whole text here.
    "penalty_last_n",
}
OPTIONS_OF_OLLAMA = {
    # Of `Options` in Ollama 0.33.0-rc2.
    *("num_ctx", "num_batch", "num_gpu", "main_gpu", "use_mmap", "num_thread", "draft_num_predict", "num_keep", "seed"),
    *("num_predict", "top_k", "top_p", "min_p", "typical_p", "repeat_last_n", "temperature", "repeat_penalty"),
    *("presence_penalty", "frequency_penalty", "stop"),
}
CONVERTER = USERS / "diskprefix/environments/llama.cpp-converter/gguf-py/gguf/constants.py"
"""Newer than the library, where `tools/bench sources` has fetched it."""


def test_each_key_of_a_generation_config_is_obeyed_or_has_a_reason() -> None:
    known = [OBEYED, HARMLESS, WITHOUT_EFFECT.keys()]
    names = vars(GenerationConfig()).keys()
    assert names - set().union(*known) == set()
    assert sum(map(len, known)) == len(set().union(*known))


@pytest.mark.parametrize("constants", [Path(gguf.__file__).parent / "constants.py", CONVERTER])
def test_each_key_of_a_tokenizer_or_of_sampling_in_a_file_is_obeyed_or_has_a_reason(constants: Path) -> None:
    if not constants.exists():
        pytest.skip("needs converter: `tools/bench sources` fetches it")
    text = constants.read_text(encoding="utf-8")
    found = {*re.findall(r'"tokenizer\.ggml\.([\w.]+)"', text)}
    assert found - OF_TOKENIZERS == set()
    assert {*re.findall(r'"general\.sampling\.(\w+)"', text)} == SAMPLING
    others = {*re.findall(r'"(tokenizer\.(?!ggml\.)[^"]+)"', text)}
    assert others == {
        *("tokenizer.huggingface.json", "tokenizer.rwkv.world", "tokenizer.chat_template"),
        *("tokenizer.chat_template.{name}", "tokenizer.chat_templates"),
    }


def test_parameters_of_ollama_are_obeyed_if_they_are_about_sampling() -> None:
    assert OF_OLLAMA.keys() | {"stop"} <= OPTIONS_OF_OLLAMA
    assert OPTIONS_OF_OLLAMA - OF_OLLAMA.keys() == {
        # Options of `serve`, or of the system.
        *("num_ctx", "num_batch", "num_gpu", "main_gpu", "use_mmap", "num_thread", "draft_num_predict", "num_keep"),
        # A request says both: a seed of the model would make all replies to a prompt alike.
        *("num_predict", "seed"),
        # Not here; the penalty counts the whole text.
        *("typical_p", "repeat_last_n"),
        # Not a number: read on its own.
        "stop",
    }


def written(folder: Path, **values: Any) -> Path:
    (folder / "config.json").write_text('{"eos_token_id": 7}', encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def test_a_folder_says_which_tokens_end_a_reply_and_which_never_come(tmp_path: Path) -> None:
    found = reply_tokens(written(tmp_path, eos_token_id=[2, 3], suppress_tokens=[5, 900]))
    assert (found.stops, found.suppressed) == ([2, 3], [5, 900])
    (tmp_path / "generation_config.json").unlink()
    assert (reply_tokens(tmp_path).stops, reply_tokens(tmp_path).suppressed) == ([7], [])


@pytest.mark.parametrize("key", ["eos_token_id", "suppress_tokens"])
@pytest.mark.parametrize("value", [True, "2", [2, 1.5]])
def test_something_else_than_tokens_is_refused(key: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"{key} is .*, which is no token"):
        reply_tokens(written(tmp_path, **{key: value}))


def test_a_key_that_changes_tokens_in_transformers_alone_is_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "diskprefix"):
        reply_tokens(written(tmp_path, no_repeat_ngram_size=35, min_length=0, temperature=0.1))
    (line,) = caplog.messages
    assert "no_repeat_ngram_size is not obeyed: it is 35" in line


def test_a_file_says_which_tokens_never_come(tmp_path: Path) -> None:
    plain, forbidding, wrong = (tmp_path / f"{name}.gguf" for name in ("plain", "forbidding", "wrong"))
    key = "tokenizer.ggml.suppress_tokens"
    assert tiny.read_file(tiny.write_gguf(plain)).suppressed == []
    tiny.write_gguf(forbidding, more=lambda writer: writer.add_array(key, [146, 7]))
    assert tiny.read_file(forbidding).suppressed == [146, 7]
    tiny.write_gguf(wrong, more=lambda writer: writer.add_array(key, ["a"]))
    with pytest.raises(ModelError, match=f"{key} is no array of tokens"):
        tiny.read_file(wrong)
