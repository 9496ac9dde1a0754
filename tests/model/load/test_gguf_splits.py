"""Text is cut as the tokenizers of the models cut it that GGUF files name."""

from __future__ import annotations

import pytest

from diskprefix.model.load.gguf_splits import set_splits
from tests.model import tiny

# DeepSeek's first tokenizer cuts an accented letter off: a later pattern has the plain letters, and cuts words again.
TEXT = "Don't count 12345 café!\n\n  x=(y)\t你好Hi あカ"
PIECES = {
    "deepseek-v3": "Don|'t| count| |123|45| café|!\n\n| | x|=(|y|)|\t|你好|Hi| |あカ",
    "deepseek-llm": "Don|'|t| count| |12345| caf|é|!|\n|\n| | x|=(|y|)|\t|你好|Hi| |あカ",
    "glm4": "Don|'t| count| |123|45| café|!\n\n| | x|=(|y|)|\t你好Hi| あカ",
    "kimi-k2": "Don't| count| |123|45| café|!\n\n| | x|=(|y|)|\t|你好|Hi| あカ",
}


@pytest.mark.parametrize("name", PIECES)
def test_text_is_cut_as_the_models_own_tokenizer_cuts_it(name: str) -> None:
    tokenizer, lines = tiny.tokenizer(), list[str]()
    set_splits(tokenizer, name, lines.append)
    found = [TEXT[first:last] for _, (first, last) in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)]
    assert "|".join(found) == PIECES[name]
    assert not lines
