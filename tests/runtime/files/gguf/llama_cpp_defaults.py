"""What llama.cpp computes with if a `.gguf` file lacks a key, read from its source.

`python -m tests.runtime.files.gguf.llama_cpp_defaults` writes the table again, from the source that `tools/bench
sources` fetches.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TypeAlias

Table: TypeAlias = dict[str, dict[str, str]]
"""By architecture and key: a number, `true`, or the name of another key. An empty text: it depends on the model. "of
all" has the keys that are read alike for each architecture."""

TABLE = Path(__file__).with_suffix(".json")
_GATE, _GATES = "expert_gating_func", {"SOFTMAX": 1, "SIGMOID": 2, "SOFTMAX_WEIGHT": 3}
_GET = re.compile(r"ml\.get_key(?:_or_arr)?\(\s*LLM_KV_(\w+),\s*([\w.]+)(?:\[[^\]]*\])?,([^;]*)\)")
_HPARAMS = re.compile(r"void (llama_model_\w+)::load_arch_hparams\(llama_model_loader & ml\) \{(.*?)\n\}", re.DOTALL)


def table_of(source: Path, architectures: list[str]) -> Table:
    """Returns the table of some architectures, by the folder `src` of llama.cpp."""
    text = {name: (source / name).read_text(encoding="utf-8") for name in ("llama-arch.cpp", "llama-model.cpp")}
    names = {name: code for code, name in re.findall(r'\{ LLM_ARCH_(\w+),\s*"([\w.-]+)"', text["llama-arch.cpp"])}
    keys = dict(re.findall(r'\{ LLM_KV_(\w+),\s*"%s\.([\w.]+)"', text["llama-arch.cpp"]))
    classes = dict(re.findall(r"case LLM_ARCH_(\w+):\s*return new (llama_model_\w+)", text["llama-model.cpp"]))
    bodies, parents = dict[str, str](), dict[str, str]()
    for path in [*(source / "models").glob("*.cpp"), source / "models/models.h"]:
        content = path.read_text(encoding="utf-8")
        bodies |= dict(_HPARAMS.findall(content))
        parents |= dict(re.findall(r"struct (llama_model_\w+) : public (llama_model_\w+)", content))
    general = re.search(r"::load_hparams\(llama_model_loader & ml\) \{(.*?)\n\}", text["llama-model.cpp"], re.DOTALL)
    assert general is not None
    fields = (source / "llama-hparams.h").read_text(encoding="utf-8")
    of_all = _defaults(general[1], "", fields, keys)
    table: Table = {"of all": of_all}
    for architecture in architectures:
        if architecture not in names:
            continue
        kind = classes[names[architecture]]
        while kind not in bodies:
            kind = parents[kind]
        own = _defaults(general[1], bodies[kind], fields, keys).items()
        table[architecture] = {key: default for key, default in sorted(own) if of_all.get(key) != default}
    return table


def _defaults(general: str, own: str, fields: str, keys: dict[str, str]) -> dict[str, str]:
    """Returns the default of each optional key that the functions `general` and `own` read: what was assigned last
    before, or the value that the field is declared with."""
    body, found = general + own, dict[str, str]()
    read = [match for match in _GET.finditer(body) if match[1] in keys]
    key_of = {match[2]: keys[match[1]] for match in read}
    for match in read:
        if not match[3].strip().endswith("false"):
            continue
        field = match[2].removeprefix("hparams.")
        assigned = re.findall(rf"\b{re.escape(match[2])}\s*=\s*([^;=]+);", body[: match.start()])
        declared = re.findall(rf"\b{re.escape(field)}\s*=\s*([^;]+);", fields)
        found[keys[match[1]]] = _value((assigned[-1:] or declared[:1] or [""])[0].strip(), key_of)
    gates = re.findall(r"gating_func\s+=\s+LLAMA_EXPERT_GATING_FUNC_TYPE_(\w+);", own)
    return found | ({_GATE: str(_GATES[gates[0]])} if len(gates) == 1 else {})


def _value(said: str, key_of: dict[str, str]) -> str:
    if re.fullmatch(r"-?[\d.]+(e-?\d+)?f?", said):
        return f"{float(said.removesuffix('f')):g}"
    return said if said in ("true", "false") else key_of.get(said, "")


def main() -> None:
    from diskprefix.progress import Report
    from diskprefix.runtime.files.gguf.known_families import MODEL_TYPES
    from tools.benchmarks.files import converter

    report: Report = print
    table = table_of(converter(report) / "src", sorted(MODEL_TYPES))
    lines = (f"{json.dumps(name)}: {json.dumps(defaults)}" for name, defaults in table.items())
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
