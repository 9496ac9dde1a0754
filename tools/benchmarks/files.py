"""Files of each supported architecture, compared with transformers and llama.cpp.

transformers makes a tiny random model (`file_models.py`), llama.cpp's converter writes the file as float32 and Q8_0,
and llama.cpp's library makes Q4_K_M of it. Each file is read in a fork, so that no file is affected by another. The
fork inherits the imported modules, so a first start is measured without imports.

Models with recurrent layers have a second, `slow` case: with steps and decays as small as in trained models, and 2,000
tokens. Its logits in float32, of the file and of the folder, must equal llama.cpp's.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import click
import numpy as np
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from diskprefix.daemon.settings import Settings
from diskprefix.folders import cache_home
from diskprefix.prefixstore.kv.layout import Layout
from diskprefix.prefixstore.kv.numbers import converted
from diskprefix.prefixstore.kv.pages import PagePool
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.progress import Report
from diskprefix.runtime import choose_runtime as choosing
from diskprefix.runtime.choose_runtime import ServableModel
from diskprefix.runtime.contract import Rows, Runtime
from diskprefix.runtime.load.loader import LoadedModel, load_model
from tests.daemon.chat.families.sources import LLAMA_CPP, SourcesMissing, download
from tests.daemon.server.chat_model import write_tokenizer
from tests.faults.isolated import run_isolated
from tests.modules import layout_of, runtime_of
from tests.slow_decays import remember
from tools.benchmarks.file_models import CASES, DENSE, VOCAB, Case
from tools.benchmarks.llama_cpp_worker import BATCH, FLOAT32, Worker, loaded, quantise
from tools.benchmarks.shapes import Q4_K_M
from tools.measuring.environments import NotInstalled, install_once, llama_cpp_libraries
from tools.measuring.options import FOLDER, JSON
from tools.measuring.processes import peak_of, status_bytes
from tools.measuring.workspace import measuring
from tools.models.real import print_report

Found: TypeAlias = dict[str, Any]

CONVERTER = ("convert_hf_to_gguf.py", "conversion/", "gguf-py/", "src/llama-", "src/models/")
"""What is kept of llama.cpp: the converter, and what reads the metadata of its files."""
LIMIT_S = 300
FORMS = ("f32", "q8_0", "q4_k_m")
MAX_ERRORS = {
    "transformers": {"f32": 1e-4, "q8_0": 0.25, "q4_k_m": 0.5},
    "llama.cpp": {"f32": 5e-3, "q8_0": 0.25, "q4_k_m": 0.25},
}
"""The errors up to which logits are equal, relative to their spread. llama.cpp looks some functions up in tables of
float16, and random weights show every rounding of quants and of activations."""


def error_of(logits: torch.Tensor, expected: torch.Tensor, form: str) -> float:
    """Returns the error of logits, [tokens, vocab], divided by the spread of a token's logits. For float32 it is the
    largest over the tokens, for quants the median, because their rounding may choose another expert for a few
    tokens."""
    spread = (expected - expected.mean(1, keepdim=True)).norm(dim=1)
    errors = ((logits - expected).norm(dim=1) / spread).nan_to_num(math.inf, math.inf)
    return float(errors.max() if form == "f32" else errors.median())


def made(case: Case) -> Any:
    """Returns a random model in float32, with numbers that bfloat16 represents exactly."""
    sizes = DENSE | case.sizes
    kind = AutoModelForCausalLM
    if case.vision is not None:
        kind, tied = AutoModelForImageTextToText, sizes["tie_word_embeddings"]
        tokens = {f"{name}_token_id": 3 + i for i, name in enumerate(("image", "video", "vision_start", "vision_end"))}
        sizes = {"text_config": sizes, "vision_config": case.vision, "tie_word_embeddings": tied, **tokens}
    torch.manual_seed(0)
    model = kind.from_config(AutoConfig.for_model(case.kind, **sizes), dtype=torch.float32).eval()
    saved = model.state_dict().keys()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        # Buffers that are not saved are computed from the configuration.
        if name in saved and tensor.is_floating_point():
            tensor.data = _random(name, tensor.data).bfloat16().float()
    if case.is_slow:
        remember(model)
    model.tie_weights()
    return model


def _random(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns random numbers for a tensor, in a range with which every part of a model changes the logits."""
    noise = torch.randn_like(tensor)
    if name.endswith("act_fn.eps"):
        # No plan computes with another bound.
        return tensor
    if tensor.ndim < 2 or "norm" in name:
        return tensor + 0.2 * noise
    if "A_log" in name or "conv" in name:
        return tensor + 0.1 * noise
    return noise if "embed" in name else noise * 1.2 / math.sqrt(tensor.shape[-1])


def token_ids(case: Case) -> list[int]:
    return torch.randint(100, VOCAB, (case.num_tokens,), generator=torch.Generator().manual_seed(1)).tolist()


@torch.inference_mode()
def logits_of(model: Any, case: Case) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=torch.tensor([token_ids(case)]), use_cache=False).logits[0].float()
    return logits


def save(case: Case, folder: Path) -> None:
    """Writes a model as the hub has it, and its logits."""
    model = made(case)
    torch.save(logits_of(model, case), folder / "transformers.pt")
    model.save_pretrained(folder / "model")
    write_tokenizer(folder / "model", chat_template=None)
    weights, config = folder / "model/model.safetensors", folder / "model/config.json"
    state = case.change(load_file(weights))
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, weights, {"format": "pt"})
    values = json.loads(config.read_text(encoding="utf-8")) | (case.hub or {})
    fields = {key: value for key, value in values.items() if value is not None or key not in (case.hub or {})}
    config.write_text(json.dumps(fields), encoding="utf-8")


def converter(report: Report) -> Path:
    """Returns the folder of llama.cpp's converter, which is fetched on first use. Raises `NotInstalled`."""
    folder = cache_home() / "environments" / "llama.cpp-converter"

    def install() -> None:
        report(f"fetching {LLAMA_CPP.requirement} (70 MB) with pip; this is done once")
        try:
            archive = download(LLAMA_CPP, folder)
        except SourcesMissing as error:
            raise NotInstalled(str(error)) from error
        with tarfile.open(archive) as packed:
            for member in packed:
                member.name = member.name.partition("/vendor/llama.cpp/")[2]
                if member.name.startswith(CONVERTER):
                    packed.extract(member, folder, filter="data")
        archive.unlink()

    install_once(folder, [LLAMA_CPP.sha256, CONVERTER], install)
    return folder


def load_converter(folder: Path, pre: str = "smollm") -> None:
    """Imports the converter into this process, whose forks use it. Every model gets the vocabulary in its folder. `pre`
    is llama.cpp's name of the pre-tokenizer."""
    # Its package `gguf` has another version than the imported one.
    for name in [module for module in sys.modules if module.partition(".")[0] == "gguf"]:
        del sys.modules[name]
    sys.path[:0] = [str(folder), str(folder / "gguf-py")]
    conversion = import_module("conversion")
    conversion.load_all_models()
    any_text: Any = conversion.base.TextModel
    for kind in {kind for kinds in conversion.ModelBase._model_classes.values() for kind in kinds.values()}:
        if issubclass(kind, any_text):
            kind.set_vocab = any_text._set_vocab_gpt2
            kind.get_vocab_base_pre = lambda *_: pre


def make(case: Case, folder: Path) -> str:
    """Writes a model, its logits and its files."""
    be_quiet()
    save(case, folder)
    if case.hub is not None:
        import_module("conversion").ModelBase.load_hparams = staticmethod(
            lambda model, *_, **__: json.loads((model / "config.json").read_bytes())
        )
    for form in forms_of(case)[:2]:
        out = ["--outfile", str(folder / f"{form}.gguf"), "--outtype", form]
        sys.argv = ["convert", str(folder / "model"), *out, *case.options]
        import_module("convert_hf_to_gguf").main()
    return ""


def forms_of(case: Case) -> Sequence[str]:
    return FORMS[:1] if case.is_slow else FORMS


def ask_llama_cpp(libraries: Path, case: Case, folder: Path, form: str) -> str:
    """Writes the logits of llama.cpp, and first the file if it is missing. llama.cpp ends the process at an error."""
    be_quiet()
    library, file = loaded(libraries), folder / f"{form}.gguf"
    if not file.exists():
        quantise(library, folder / "f32.gguf", file, Q4_K_M)
    ids, logits = token_ids(case), list[torch.Tensor]()
    worker = Worker(library, str(file), len(ids), str(folder), flash_attention=False, cache_type=FLOAT32, sequences=1)
    for at in range(0, len(ids), BATCH):
        rows = [(token, at + i, 0, True) for i, token in enumerate(ids[at : at + BATCH])]
        worker.decode(rows)
        logits += [torch.from_numpy(worker.logits(row).copy()) for row in range(len(rows))]
    torch.save(torch.stack(logits), folder / f"llama.cpp-{form}.pt")
    return ""


def be_quiet() -> None:
    """Silences the libraries, and the debugger that llama.cpp starts when it aborts."""
    os.environ["GGML_NO_BACKTRACE"] = "1"
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


def read(case: Case, folder: Path, form: str) -> str:
    """Returns the figures of a file as JSON: the first start, where the model is exact, the errors, and the fault or
    ""."""
    be_quiet()
    os.environ["XDG_CACHE_HOME"] = str(folder / f"cache-{form}")
    weights = "native" if form == "f32" else "auto"
    # llama.cpp's context has room for the prompt alone, which in some models chooses the factors of positions.
    settings = Settings(model=str(folder / f"{form}.gguf"), weights=weights, context=case.num_tokens)
    before, began = status_bytes(os.getpid(), "RssAnon"), time.perf_counter()
    with peak_of(lambda: status_bytes(os.getpid(), "RssAnon")) as memory:
        model = choosing.servable(load_model(settings, lambda _: None), settings)
    figures: Found = {"start_s": time.perf_counter() - began, "start_bytes": memory.peak_bytes - before}
    errors = errors_of(computed(model, case, form), folder, form)
    equal = equal_to(errors, form)
    fault = "" if equal else "equals neither"
    if form == "f32" and not has_layer_of(folder / "model", model.loaded):
        fault = "its draft layer is not that of the folder"
    if case.is_slow:
        settings = Settings(model=str(folder / "model"), dtype="float32")
        of_folder = choosing.servable(load_model(settings, print), settings)
        figures["folder_errors"] = errors_of(of_runtime(of_folder.runtime, of_folder.layout, case), folder, form)
        for of, compared in (("it", errors), ("its folder", figures["folder_errors"])):
            fault = fault or ("" if "llama.cpp" in equal_to(compared, form) else f"{of} does not equal llama.cpp")
    if model.reason:
        fault = f"not exact at every token: {model.reason}"
    return json.dumps(
        figures | {"exact_at": model.layout.exact_at, "errors": errors, "equal_to": equal, "fault": fault}
    )


def errors_of(logits: torch.Tensor, folder: Path, form: str) -> dict[str, float]:
    """Returns the errors of logits against the logits of each program that has written some."""
    errors = {}
    for name in MAX_ERRORS:
        if (path := folder / f"{name}-{form}.pt").exists() or (path := folder / f"{name}.pt").exists():
            errors[name] = error_of(logits, torch.load(path), form)
    return errors


def equal_to(errors: dict[str, float], form: str) -> list[str]:
    return [name for name, error in errors.items() if error <= MAX_ERRORS[name][form]]


@torch.inference_mode()
def computed(model: ServableModel, case: Case, form: str) -> torch.Tensor:
    """Returns the logits that a daemon computes; with the form `f32` in float32."""
    layout, runtime, modules = model.layout, model.runtime, model.loaded.model
    if form == "f32":
        modules = (model.loaded.read_modules() if modules is None else deepcopy(modules)).float()
        modules.config.context = case.num_tokens
        layout, _ = layout_of(modules)
        runtime = runtime_of(modules, layout, 256)
    if layout.exact_at != "token":
        return logits_of(modules, case)
    return of_runtime(runtime, layout, case)


def of_runtime(runtime: Runtime, layout: Layout, case: Case) -> torch.Tensor:
    """Returns the logits of all tokens, computed in steps."""
    ids, logits = np.array(token_ids(case)), list[torch.Tensor]()
    sequence = KVSequence(PagePool(layout, block_size=256))
    for at in range(0, len(ids), BATCH):
        part = ids[at : at + BATCH]
        logits.append(torch.from_numpy(runtime.run([Rows(sequence, part, len(part))]).logits[0]).clone())
    return torch.cat(logits)


def has_layer_of(folder: Path, files: LoadedModel) -> bool:
    """Returns whether a file's model has no draft layer, or the same draft layer as the folder's model."""
    if files.weights is None or not files.weights.has_draft_layer:
        return True
    layers = [
        {name: converted(array, "bfloat16") for name, array in model.weights.named() if name.startswith("draft_layer.")}
        for model in (files, load_model(Settings(model=str(folder)), print))
        if model.weights is not None and model.weights.has_draft_layer
    ]
    of_file, expected = layers[0], layers[-1]
    is_of_both = len(layers) == 2 and of_file.keys() == expected.keys()
    return is_of_both and all(np.array_equal(of_file[name], expected[name]) for name in expected)


def isolated(work: Callable[[], str]) -> str:
    """Returns what `work` returns in a fork, or in one line why it did not end."""
    return run_isolated(work, LIMIT_S).strip().rpartition("\n")[2]


def measured(case: Case, libraries: Path | None, folder: Path) -> Found:
    """Returns the figures of a model's file by form."""
    if fault := isolated(partial(make, case, folder)):
        return {FORMS[0]: {"fault": f"no file: {fault}"}}
    by_form: Found = {}
    for form in forms_of(case):
        if libraries is not None:
            isolated(partial(ask_llama_cpp, libraries, case, folder, form))
        # llama.cpp's library does not read every file that its converter writes.
        if (folder / f"{form}.gguf").exists():
            answer = isolated(partial(read, case, folder, form))
            by_form[form] = json.loads(answer) if answer.startswith("{") else {"fault": answer}
    return by_form


def lines_of(name: str, by_form: Found) -> list[str]:
    errors = [by_form.get(form, {}).get("errors", {}).get(program) for form in FORMS for program in MAX_ERRORS]
    cells = [f"{'-' if error is None else format(error, '.1e'):>8} " for error in errors]
    seconds, mib = (max(figures.get(key, 0) for figures in by_form.values()) for key in ("start_s", "start_bytes"))
    exact = "token" if all(figures.get("exact_at") == "token" for figures in by_form.values()) else "no"
    equal = " and ".join(by_form["f32"].get("equal_to", ())) or "neither"
    line = [f"{name:<25}", " ".join(cells), f"{seconds:5.1f} s", f"{mib >> 20:4} MiB", f"{exact:5}", equal]
    return [
        "  ".join(line),
        *(f"    {form}: {figures['fault']}" for form, figures in by_form.items() if figures["fault"]),
    ]


def counts_of(by_model: Found) -> str:
    wrong = sum(any(figures["fault"] for figures in forms.values()) for forms in by_model.values())
    equal = [forms["f32"].get("equal_to", []) for forms in by_model.values()]
    return (
        f"{len(by_model)} models: {sum('transformers' in names for names in equal)} equal transformers, "
        f"{equal.count(['llama.cpp'])} llama.cpp alone; {wrong} wrong; "
        f"{sum('q4_k_m' not in forms for name, forms in by_model.items() if not CASES[name].is_slow)} without Q4_K_M"
    )


HEADER = "  ".join([f"{'':<25}", *(f"{form:>8}  llama.cpp" for form in FORMS)])


@click.command()
@click.argument("architectures", nargs=-1)
@FOLDER
@JSON
def main(architectures: Sequence[str], folder: Path | None, *, as_json: bool) -> None:
    """Read tiny files of all ARCHITECTURES, and compare their logits with those of transformers and llama.cpp.

    For each form of the file, the errors against the two; then the longest first start and its memory, whether the
    model is exact at every token, and which of the two it equals in float32. Takes three seconds a model. Exits with
    1 if a file is not read, equals neither, or is not exact.
    """
    known = {name.partition("/")[0] for name in CASES} | set(CASES)
    if unknown := [name for name in architectures if name not in known]:
        raise click.UsageError(f"no such architecture: {', '.join(unknown)}")
    chosen = [name for name in CASES if not architectures or {name, name.partition("/")[0]} & set(architectures)]
    libraries, by_model = libraries_if_any(), {}
    load_converter(converter(print_report))
    if not as_json:
        click.echo(HEADER)
    for name in chosen:
        with measuring(folder, Console(stderr=True)) as workspace:
            by_model[name] = measured(CASES[name], libraries, workspace)
        if not as_json:
            click.echo("\n".join(lines_of(name, by_model[name])))
    click.echo(json.dumps(by_model, indent=2) if as_json else counts_of(by_model))
    sys.exit(1 if any(figures["fault"] for forms in by_model.values() for figures in forms.values()) else 0)


def libraries_if_any() -> Path | None:
    """Returns the libraries of llama.cpp. Without npm, there are none."""
    try:
        return llama_cpp_libraries(print_report)
    except NotInstalled as error:
        print_report(f"{error}; nothing is compared with llama.cpp, and there is no Q4_K_M")
        return None
