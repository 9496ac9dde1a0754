"""The models that are known by name, what `models.toml` may say of them, and what `list` and `show` tell."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from diskprefix.daemon.catalogue import catalogue
from diskprefix.daemon.catalogue.catalogue import Catalogue, known_names, needs, open_catalogue
from diskprefix.daemon.router.listing import Listing
from diskprefix.daemon.settings import Settings
from diskprefix.errors import ModelError, ModelNotFound, SettingsError
from diskprefix.runtime.fetch.embedded import EMBEDDED
from diskprefix.runtime.fetch.named_model import plain_name
from tests.desk.conftest import run as run

pytestmark = pytest.mark.usefixtures("own_places")

ROOT = Path(__file__).parents[3]


@pytest.fixture
def models_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    (folder / "deep" / "er").mkdir(parents=True)
    for name in ("tiny-Q8_0.gguf", "mmproj-tiny-f16.gguf", "deep/er/other.gguf"):
        (folder / name).write_bytes(b"GGUF")
    for part in (1, 2):
        (folder / "deep" / f"split-0000{part}-of-00002.gguf").write_bytes(b"GGUF")
    (folder / "deep" / "lacks-00001-of-00002.gguf").write_bytes(b"GGUF")
    for name in ("made", "only-config"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text("{}")
    (folder / "made" / "model.safetensors").write_bytes(b"")
    (folder / "made" / "inside.gguf").write_bytes(b"")
    (folder / "deep" / "loop").symlink_to(folder)
    return folder


def names(settings: Settings) -> list[str]:
    return [model.name for model in Catalogue(settings).models()]


def pulled(tmp_path: Path, repo: str, *files: str) -> Path:
    folder = tmp_path / "hub" / f"models--{repo.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text("abc")
    for name in files:
        file = folder / "snapshots" / "abc" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"GGUF")
    return folder / "snapshots" / "abc"


def written(folder: Path, text: str) -> Path:
    file = folder / "models.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_a_folder_gives_files_split_files_once_and_folders_with_weights(models_dir: Path) -> None:
    assert names(Settings(models_dir=models_dir)) == ["other", "split", "made", "tiny-Q8_0"]
    split = Catalogue(Settings(models_dir=models_dir)).find("split")
    assert split.settings.model == str(models_dir / "deep" / "split-00001-of-00002.gguf")
    assert split.settings.served_model_name == "split"


def test_models_with_one_name_are_told_apart_by_their_folders_or_the_extension(models_dir: Path) -> None:
    for name in ("deep/tiny-Q8_0", "deep/er/tiny-Q8_0", "made"):
        (models_dir / f"{name}.gguf").write_bytes(b"GGUF")
    found = {*names(Settings(models_dir=models_dir))}
    assert found == {"tiny-Q8_0", "deep/tiny-Q8_0", "deep/er/tiny-Q8_0", "made", "made.gguf", "other", "split"}


@pytest.mark.parametrize("place", ["models", "home/.lmstudio/models", "hub/models--org--repo/snapshots/abc"])
def test_a_name_that_is_not_utf_8_leaves_out_one_model_and_does_not_refuse_the_start(
    place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "models").mkdir()
    for name in ("caf\udce9", "good"):
        (tmp_path / place / name).mkdir(parents=True)
        (tmp_path / place / name / f"{name[:3]}-Q8_0.gguf").write_bytes(b"GGUF")
    (found,) = names(Settings(models_dir=tmp_path / "models"))
    assert "goo" in found
    assert [message.partition(":")[0] for message in caplog.messages] == ["[models] a model is left out"]


@pytest.mark.parametrize("model", ["~nouser/x", "x" * 300])
def test_a_model_that_cannot_be_a_path_is_not_here(model: str, tmp_path: Path) -> None:
    file = written(tmp_path, f'[a]\nmodel = "{model}"\n')
    assert Catalogue(Settings(models_file=file)).find("a").path is None
    assert Settings(model=f"{model},b").model_names == (model, "b")


@pytest.mark.parametrize(
    ("config", "index"),
    [('{"layer_types": 3}', '{"weight_map": {}}'), ("{}", '{"weight_map": {"a": [1]}}'), ("{}", "3")],
)
def test_needs_raises_model_error_for_an_unreadable_folder(config: str, index: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "part.safetensors").write_bytes(b"")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError):
        needs(Settings(model=str(tmp_path)))


def test_an_idle_time_of_0_is_never_as_that_of_the_daemon(tmp_path: Path) -> None:
    settings = Settings(models_file=written(tmp_path, '[a]\nmodel = "x"\nidle_unload = 0\n[b]\nmodel = "y"\n'))
    for seconds, of_b in ((60, 60), (0, None)):
        catalogue = Catalogue(replace(settings, idle_unload=seconds))
        listing = Listing(replace(settings, idle_unload=seconds), catalogue)
        found = [listing.idle_unload_s(catalogue.find(name)) for name in "ab"]
        assert found == [None, of_b]


def test_one_model_is_served_as_before_and_needs_no_catalogue(tmp_path: Path) -> None:
    assert open_catalogue(Settings()) is None
    assert open_catalogue(Settings(model="org/name")) is None
    with_comma = tmp_path / "a,b.gguf"
    with_comma.write_bytes(b"GGUF")
    assert open_catalogue(Settings(model=str(with_comma))) is None
    several = open_catalogue(Settings(model="org/a, org/b:Q4_K_M"))
    assert several is not None
    assert [model.name for model in several.models()] == ["org/a", "org/b:Q4_K_M"]
    assert needs(Settings(model="org/absent")) is needs(Settings()) is None


def test_the_file_in_the_folder_of_configuration_is_read_where_no_model_is_given(tmp_path: Path) -> None:
    written(tmp_path / "config" / "diskprefix", '[a]\nmodel = "org/a"\n')
    assert names(Settings()) == ["a"]
    assert open_catalogue(Settings(model="org/b")) is None
    assert names(Settings(model="org/b,org/c")) == ["org/b", "org/c"]


def test_the_embedded_model_has_one_name_alone_and_among_several_and_its_file_s_name_finds_it(
    models_dir: Path, tmp_path: Path
) -> None:
    file = tmp_path / "cache/diskprefix/models" / EMBEDDED.requirement / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"GGUF")
    other = models_dir / "tiny-Q8_0.gguf"
    assert plain_name(str(file)) == plain_name(str(file.parent)) == EMBEDDED.name
    for first in (str(file), str(file.parent), EMBEDDED.name):
        several = Catalogue(Settings(model=f"{first},{other}"))
        assert [model.name for model in several.models()] == [EMBEDDED.name, "tiny-Q8_0"]
        assert several.find(file.stem) is several.find(EMBEDDED.name)
    assert names(Settings(models_dir=file.parent, model=str(other))) == ["tiny-Q8_0", EMBEDDED.name]
    # A copy of the user's keeps its own name.
    (models_dir / file.name).write_bytes(b"GGUF")
    copied = Catalogue(Settings(model=f"{file},{models_dir / file.name}"))
    assert copied.find(file.stem).path == models_dir / file.name


def test_a_table_has_its_own_settings_beside_those_of_the_daemon(tmp_path: Path) -> None:
    text = """
    [small]
    model = "small.gguf"
    aliases = ["claude-haiku-4-5"]
    kv-memory = "2GiB"
    weights = "native"
    disk_prefix_cache = "FULL"
    sampling = "temperature=0.7"
    chat_template_kwargs = '{"preserve_thinking": false}'
    chat_template = "small.jinja"
    draft_model = "org/draft"
    speculative = "ngram"
    pin = true
    idle_unload = "30m"
    [large]
    model = "org/large:Q4_K_M"
    """
    file = written(tmp_path, text)
    for name in ("small.gguf", "small.jinja"):
        (tmp_path / name).write_bytes(b"GGUF")
    catalogue = Catalogue(Settings(models_file=file, port=9000, kv_memory=1 << 30))
    small, large = catalogue.models()
    assert catalogue.find("claude-haiku-4-5") is small
    assert (small.pin, small.idle_unload_s, small.path) == (True, 1800, tmp_path / "small.gguf")
    own = small.settings
    assert (own.kv_memory, own.weights, own.disk_prefix_cache, own.port) == (2 << 30, "native", "full", 9000)
    assert own.model == str(tmp_path / "small.gguf"), "a file beside models.toml, whatever the process's folder is"
    assert (own.chat_template, own.draft_model, own.speculative) == (tmp_path / "small.jinja", "org/draft", "ngram")
    assert own.sampling_values == {"temperature": 0.7}
    assert own.template_variables == {"preserve_thinking": False}
    assert (large.settings.kv_memory, large.settings.model, large.path) == (1 << 30, "org/large:Q4_K_M", None)
    assert (large.pin, large.idle_unload_s) == (False, None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[a]\nmodel = 3", "a.model: must be a text"),
        ("[a]\naliases = []", "a.model: is missing"),
        ('[a]\nmodel = "x"\naliases = "y"', "a.aliases: must be a list of names"),
        ('[a]\nmodel = "x"\npin = 1', "a.pin: must be true or false"),
        ('[a]\nmodel = "x"\nidle_unload = "30 M"', "a.idle_unload: '30 M' is not a duration"),
        ('[a]\nmodel = "x"\nidle_unload = "6000w"', "a.idle_unload: 3628800000.0 is out of range"),
        ('[a]\nmodel = "x"\nidle_unload = true', "a.idle_unload: must be a duration"),
        ('[a]\nmodel = "x"\nkv_memory = "much"', "a.kv_memory: 'much' is not a size"),
        ('[a]\nmodel = "x"\nkv_memory = [1]', "a.kv_memory: must be a number or a text"),
        ('[a]\nmodel = "x"\nspeculative = true', "a.speculative: must be one of off, ngram, mtp, auto, in quotes"),
        ('[a]\nmodel = "x"\ndraft_model = ""', "a.draft_model: must be a file, a folder or a repository"),
        ('[a]\nmodel = "x"\nspeculative = "off"\ndraft_model = "y"', "a: --draft-model: has no effect with"),
        ('[a]\nmodel = "x"\nport = 80', "a.port: unknown key; a model has"),
        ('[a]\nmodel = "x"\nalias = ["b"]', "a.alias: unknown key (meant: aliases?); a model has"),
        ('[a]\nmodel = "x"\nkv-memry = "1GiB"', "a.kv-memry: unknown key (meant: kv_memory?)"),
        ('[a]\nmodel = "x"\nweights = "int3"', "a.weights: "),
        ('[a]\nmodel = "x"\nkv-memory = 1000000000\nkv_memory = 1000000000', "is given twice"),
        ("a = 3", "a: must be a table"),
        ("[a", "is not valid TOML"),
        ('[a]\nmodel = "x"\n[b]\nmodel = "y"\naliases = ["a"]', "two models are called 'a'"),
    ],
)
def test_a_mistake_in_the_file_is_one_line_with_the_path_of_the_key(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        Catalogue(Settings(models_file=written(tmp_path, text)))
    assert words in caught.value.message
    assert "\n" not in caught.value.message


def test_a_file_is_known_once_by_the_first_who_names_it(models_dir: Path, tmp_path: Path) -> None:
    file = written(tmp_path, f'[mine]\nmodel = "{models_dir}/tiny-Q8_0.gguf"\n')
    assert names(Settings(models_file=file, models_dir=models_dir)) == ["mine", "other", "split", "made"]


def test_pulled_models_are_known_by_repository_and_quant(tmp_path: Path) -> None:
    folder = pulled(
        tmp_path, "org/tiny-GGUF", "tiny-q4_k_m.gguf", "tiny-UD-Q8_K_XL.gguf", "mmproj-F16.gguf", "odd.gguf"
    )
    pulled(tmp_path, "org/whole", "config.json", "model.safetensors")
    pulled(tmp_path, "org/half", "config.json", "model.safetensors.index.json")
    pulled(tmp_path, "org/part", "config.json", "model-00001-of-00002.safetensors")
    empty = written(tmp_path, "")
    found = ["org/tiny-GGUF:Q4_K_M", "org/tiny-GGUF:UD-Q8_K_XL", "org/tiny-GGUF:odd", "org/whole"]
    assert sorted(names(Settings(models_file=empty))) == sorted(found)
    known = Catalogue(Settings(models_file=empty)).find("org/tiny-GGUF:Q4_K_M")
    assert (known.origin, known.settings.model) == ("pulled", str(folder / "tiny-q4_k_m.gguf"))
    assert names(Settings(models_file=empty, model="org/other")) == ["org/other"], "who names models gets these"


def test_a_pulled_model_yields_to_one_of_the_users_with_its_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pulled(tmp_path, "org/whole", "config.json", "model.safetensors")
    pulled(tmp_path, "org/tiny-GGUF", "tiny-Q8_0.gguf")
    for place in ("org/whole", "else/whole"):
        (tmp_path / "models" / place).mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            (tmp_path / "models" / place / name).touch()
    file = written(tmp_path, '[mine]\nmodel = "x/y"\naliases = ["org/tiny-GGUF:Q8_0"]')
    catalogue = Catalogue(Settings(models_dir=tmp_path / "models", models_file=file))
    assert [model.name for model in catalogue.models()] == ["mine", "else/whole", "org/whole"]
    assert catalogue.find("org/whole").origin == "--models-dir"
    assert catalogue.find("org/tiny-GGUF:Q8_0").name == "mine"
    assert len(caplog.messages) == 2
    assert "not what was pulled with this name" in caplog.text


def test_reading_again_finds_what_changed_and_keeps_all_if_it_cannot(models_dir: Path, tmp_path: Path) -> None:
    file = written(tmp_path, "")
    catalogue = Catalogue(Settings(models_dir=models_dir, models_file=file))
    (models_dir / "tiny-Q8_0.gguf").rename(models_dir / "new.gguf")
    catalogue.read_again()
    assert [model.name for model in catalogue.models()] == ["other", "split", "made", "new"]
    file.write_text("[")
    with pytest.raises(SettingsError):
        catalogue.read_again()
    assert catalogue.find("new").path == models_dir / "new.gguf"


def test_an_unknown_name_is_a_404_that_names_the_nearest(models_dir: Path, tmp_path: Path) -> None:
    catalogue = Catalogue(Settings(models_dir=models_dir))
    with pytest.raises(ModelNotFound, match="no model is called 'tiny-q8'; the nearest name is 'tiny-Q8_0'") as caught:
        catalogue.find("tiny-q8")
    assert (caught.value.http_status, caught.value.param) == (404, "model")
    with pytest.raises(ModelNotFound, match=r"there are other, split, made, tiny-Q8_0$"):
        catalogue.find("zzz")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFound, match=r"`diskprefix pull \S+:\S+`"):
        Catalogue(Settings(models_dir=tmp_path / "empty")).find("zzz")


def test_with_several_models_the_error_for_a_name_that_programs_have_built_in_gives_an_alias(
    models_dir: Path, tmp_path: Path
) -> None:
    (models_dir / "tiny-Q8_0.gguf").rename(models_dir / "gpt-4o.gguf")
    pulled(tmp_path, "org/tiny-GGUF", "tiny-Q8_0.gguf", "tiny-Q4_0.gguf")
    usual, own = tmp_path / "config/diskprefix/models.toml", tmp_path / "own/models.toml"
    both = f"{models_dir}/tiny-Q4.gguf,org/other"
    for settings, file, is_flag_needed in (
        (Settings(models_dir=models_dir), usual, False),
        (Settings(models_file=written(tmp_path / "empty", "")), tmp_path / "empty/models.toml", False),
        (Settings(model=both), usual, True),
        (Settings(models_file=own), own, False),
        (Settings(models_file=own, model=both), own, False),
    ):
        usual.unlink(missing_ok=True)
        written(own.parent, '["a.b"]\nmodel = "org/tiny-GGUF:Q8_0"\n')
        (models_dir / "tiny-Q4.gguf").write_bytes(b"GGUF")
        before = Catalogue(settings)
        with pytest.raises(ModelNotFound) as refused:
            before.find("claude-opus-4-5:latest")
        assert str(tmp_path) not in refused.value.for_caller(sees_all=False).message
        # It is used as the message says.
        found = re.search(r"`(.*)` (?:as the first line of|below \[a\.b\] in) ([^, ]+)", refused.value.message)
        assert found is not None
        line, place = found.groups()
        assert (place, "--models-file" in refused.value.message) == (str(file), is_flag_needed)
        file.parent.mkdir(parents=True, exist_ok=True)
        text = file.read_text() if file.exists() else ""
        file.write_text(f"{text}{line}\n" if "below" in refused.value.message else f"{line}\n{text}")
        after = Catalogue(replace(settings, models_file=file) if is_flag_needed else settings)
        named, plain = after.find("claude-opus-4-5"), before.find(before.models()[0].name)
        assert (named.name, named.path) == (plain.name, plain.path)
        assert [model.name for model in after.models()] == [model.name for model in before.models()]
    for name in ("", "tiny"):
        with pytest.raises(ModelNotFound) as refused:
            before.find(name)
        assert "aliases" not in refused.value.message


def test_names_of_models_that_are_not_served_are_known(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pulled(tmp_path, "org/gpt-4", "config.json", "model.safetensors")
    file = written(tmp_path, '[gpt-4o]\nmodel = "x"\naliases = ["claude-mine"]\n')
    asked = Settings(model="served", models_file=file)
    assert {name for name, _ in known_names(asked)} == {"org/gpt-4", "gpt-4o", "claude-mine"}
    file.write_text("[")
    assert {name for name, _ in known_names(asked)} == {"org/gpt-4"}
    assert "the names in models.toml are not known: --models-file" in caplog.text


def test_a_name_that_no_model_can_have_is_refused_before_any_look_up_and_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, f'["{"a" * 200}"]\nmodel = "x"\n["{"b" * 201}"]\nmodel = "y"\n')
    models = Catalogue(Settings(models_file=file))
    assert [known.name for known in models.models()] == ["a" * 200]
    monkeypatch.setattr(catalogue, "nearest", None)
    assert models.find("a" * 200).source == "x"
    with pytest.raises(ModelNotFound, match=r"^model: no model has a name of 201 characters; 200 are the most$"):
        models.find("b" * 201)


@pytest.mark.parametrize("field", ["served_model_name", "draft_model", "chat_template"])
def test_what_fits_one_model_is_refused_for_several(field: str, models_dir: Path) -> None:
    value = Path("x") if field == "chat_template" else "x"
    with pytest.raises(SettingsError, match="is for one model"):
        Catalogue(Settings(models_dir=models_dir, **{field: value}))  # type: ignore[arg-type]


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"^--models-dir: cannot read .*nowhere: No such file"):
        Catalogue(Settings(models_dir=tmp_path / "nowhere"))


# -- list and show ---------------------------------------------------------------------------------------------------
