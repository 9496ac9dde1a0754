"""The table of models and the adviser: sizes beside those of published files, and which model is advised when."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from diskprefix.daemon.catalogue import adviser
from diskprefix.daemon.catalogue.adviser import advised, cost_text, memory_bytes, proposed
from diskprefix.daemon.catalogue.catalogue import Catalogue
from diskprefix.daemon.settings import Settings
from diskprefix.errors import SettingsError
from diskprefix.folders import cache_home
from diskprefix.memo import PREFILL_SPEEDS
from diskprefix.runtime.fetch.embedded import EMBEDDED
from diskprefix.runtime.fetch.hub import split_name
from diskprefix.runtime.fetch.proposals import full_name, meant_name, require_repository, short_name, short_names
from diskprefix.units import format_size, rough_duration
from tests.desk.conftest import Run
from tests.desk.conftest import run as run

pytestmark = pytest.mark.usefixtures("own_places")

PUBLISHED = {
    "qwen3:0.6b": 396_705_472,
    "qwen3:1.7b": 1_107_409_472,
    "qwen3-coder:30b": 18_556_689_568,
    "gemma3:12b": 7_300_778_336,
    "llama3.2:3b": 2_019_377_696,
    "llama3.1:8b": 4_920_000_000,
    "qwen3.6:35b": 22_134_528_992,
    "gemma4:e4b": 4_977_169_568,
    "gemma4:26b": 17_000_000_000,
    "qwen3.5:4b": 2_740_000_000,
    "qwen3.5:9b": 5_680_000_000,
    "gpt-oss:20b": 12_109_566_624,
    "glm-4.7-flash": 18_312_339_776,
    "lfm2:1.2b": 730_893_024,
    "lfm2:8b": 5_040_000_000,
    "mistral:7b": 4_370_000_000,
    "smollm2:360m": 271_000_000,
    "smollm2:135m": EMBEDDED.gguf_bytes,
}
"""The bytes of files on the hub, as other projects write them down: not from our formula."""
COUNTED = {
    "qwen3.6:35b": 24_900_000_000,
    "gemma4:26b": 19_500_000_000,
    "gpt-oss:20b": 13_700_000_000,
    "gemma4:e4b": 10_200_000_000,
    "qwen3.5:9b": 9_700_000_000,
    "gemma4:e2b": 7_400_000_000,
    "qwen3.5:4b": 5_900_000_000,
    "qwen3.5:2b": 2_900_000_000,
}
"""The memory that `model.load.fit` counted for files of these shapes, with 16,384 tokens."""


@pytest.mark.parametrize(("name", "num_bytes"), PUBLISHED.items())
def test_sizes_of_the_table_are_within_five_percent_of_published_files(name: str, num_bytes: int) -> None:
    assert short_names()[name].weights_bytes == pytest.approx(num_bytes, rel=0.05)


@pytest.mark.parametrize(("name", "num_bytes"), COUNTED.items())
def test_memory_of_the_table_is_near_what_is_counted_for_files(name: str, num_bytes: int) -> None:
    assert memory_bytes(short_names()[name], 16_384) == pytest.approx(num_bytes, rel=0.15)


def test_every_short_name_is_a_quant_of_a_repository_in_any_case_and_without_its_tag() -> None:
    for name, row in short_names().items():
        if row.source != EMBEDDED.name:
            repo, quant = split_name(row.source)
            assert re.fullmatch(r"[\w.-]+/[\w.-]+", repo), name
            assert quant in row.quant, name
        assert full_name(name.upper()) == full_name(f"{name}:latest") == row.source
        assert short_name(row.source.lower()) is row
        assert 0 < row.used <= row.parameters
    sources = [row.source for row in short_names().values()]
    assert len(sources) == len({*sources})
    assert full_name("llama3.2") == short_names()["llama3.2:3b"].source
    assert full_name("Llama3.2") == full_name("llama3.2:latest")
    assert full_name("llama3.2:5b") == "llama3.2:5b"


def test_a_name_without_a_tag_is_a_size_of_its_family_or_names_all_of_them() -> None:
    of_ollama = {"qwen3.5": "qwen3.5:9b", "qwen3.6": "qwen3.6:35b", "llama3.2": "llama3.2:3b", "gpt-oss": "gpt-oss:20b"}
    for family, name in of_ollama.items():
        assert full_name(family) == short_names()[name].source
    for family in {name.partition(":")[0] for name in short_names()}:
        if (row := short_name(family)) is not None:
            assert row.name.partition(":")[0] == family
            continue
        with pytest.raises(SettingsError) as refused:
            require_repository(family)
        assert [name for name in short_names() if name.startswith(family) and name not in refused.value.message] == []
    with pytest.raises(SettingsError, match=r"qwen3\.5 has the short names qwen3\.5:2b, qwen3\.5:4b, qwen3\.5:9b"):
        require_repository("qwen3.5:27b")


@pytest.mark.parametrize("name", ["smollm2", "smollm2:135m", "SmolLM2:latest", "smollm2-135m-instruct"])
def test_ollamas_names_of_the_embedded_model_are_the_embedded_model(name: str, run: Run, tmp_path: Path) -> None:
    assert meant_name(name) == require_repository(name) == EMBEDDED.name
    assert f'model = "{EMBEDDED.name}"' in run("serve", "--model", name, "--print-config").stdout
    several = Catalogue(Settings(model=f"{EMBEDDED.name},org/other"))
    assert several.find(name).name == EMBEDDED.name
    assert str(tmp_path) in str(cache_home()), "it is not here"
    run("show", name).assert_refused(3, f"{EMBEDDED.name} is not on this machine; `diskprefix serve` fetches it")


@pytest.mark.parametrize(
    ("gb", "name"),
    [(1, "qwen3.5:4b"), (8, "qwen3.5:4b"), (16, "qwen3.5:4b"), (20, "gpt-oss:20b"), (64, "qwen3.6:35b")],
)
def test_the_fastest_model_for_agents_that_leaves_a_quarter_free_is_advised(gb: int, name: str) -> None:
    assert advised(gb * 10**9).name == name


def test_only_models_good_enough_for_agents_are_advised_and_the_quarter_is_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    least = memory_bytes(short_names()["gpt-oss:20b"]) * 4 // 3 + 1
    assert [advised(num_bytes).name for num_bytes in (least, least - 2)] == ["gpt-oss:20b", "qwen3.5:4b"]
    assert all(advised(gib << 30).suits_agents for gib in range(1, 200))
    monkeypatch.setattr(adviser, "available_ram_bytes", lambda: 1 << 30)
    assert "the smallest that is good enough for agents: free some memory first)" in proposed()


def test_minutes_are_those_that_a_daemon_has_measured_or_a_guess_in_whole_units() -> None:
    row = short_names()["qwen3.5:4b"]
    assert re.search(r"takes about \d+ (minutes|hours), a rough guess", cost_text(row))
    PREFILL_SPEEDS.put(row.source, 0.02)
    assert "an agent's first prompt takes about 6 minutes, measured here" in cost_text(row)
    assert advised(8 * 10**9) is row


def test_a_first_prompt_is_told_in_whole_units() -> None:
    told_of = {
        3: "a few seconds",
        19: "about 20 s",
        46.2: "about a minute",
        421: "about 7 minutes",
        9000: "about 2 hours",
    }
    assert {seconds: rough_duration(seconds) for seconds in told_of} == told_of


def test_the_front_page_has_the_sizes_of_the_adviser() -> None:
    page = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| `([^`]+)`, ([\d.]+ GiB) \| ([^|]+) \|", page, re.MULTILINE)
    assert len(told) == 3
    for name, file, memory in told:
        row = short_names()[name]
        assert (file, memory) == (format_size(row.download_bytes), format_size(memory_bytes(row)))
    [(pulled, file, free)] = re.findall(r"diskprefix pull (\S+) .*agents: ([\d.]+ GiB), for (\d+) GiB of free", page)
    assert file == format_size(short_names()[pulled].download_bytes)
    least = memory_bytes(short_names()[pulled]) / adviser._USABLE / 2**30
    assert int(free) == round(least)
    assert f"memory with {adviser.TOLD_CONTEXT:,} tokens" in page
