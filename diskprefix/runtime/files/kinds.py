"""The kind of model that a configuration describes: one that is served, or one that is not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

from diskprefix.errors import ModelError
from diskprefix.runtime.imports import transformers_quietly
from diskprefix.runtime.plan.families.type_table import class_of, has_type, text_of
from diskprefix.runtime.plan.model_config import ModelConfig, text_within

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_EMBEDDING, LATER_TOKENS = "an embedding model", "a model whose tokens see later ones"


class ModelKind(Struct, frozen=True):
    """A kind of model that is served. `loader` names its auto class in transformers. `has_own_generate`: its class
    replaces `generate`, so its use of pictures is unknown. `has_draft_layer`: with the layer of `draft_layer.py`.
    `is_encoder`: only the modules that encode pictures are of interest."""

    loader: Literal["AutoModelForCausalLM", "AutoModelForMultimodalLM"]
    is_multimodal: bool
    has_own_generate: bool
    has_draft_layer: bool = False
    is_encoder: bool = False

    def model_class(self, config: PreTrainedConfig) -> type[PreTrainedModel]:
        """Returns the class of a model with this configuration."""
        from transformers.models.auto.auto_factory import _get_model_class

        loader = getattr(transformers_quietly(), self.loader)
        model_class: type[PreTrainedModel] = _get_model_class(config, loader._model_mapping)
        return without_decoder(model_class) if self.is_encoder else model_class

    def config_of_class(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Returns the part of a configuration that the model's class takes."""
        text = config.sub_configs.get("text_config")
        is_text = text is not None and getattr(self.model_class(config), "config_class", None) == text
        return config.get_text_config() if is_text else config

    def skeleton(self, config: PreTrainedConfig) -> PreTrainedModel:
        """Returns a model with this configuration in bfloat16, without weights: it is on torch's meta device."""
        import torch
        from transformers.initialization import no_init_weights

        model_class = self.model_class(config)
        with torch.device("meta"), no_init_weights():
            return model_class._from_config(self.config_of_class(config), dtype=torch.bfloat16)


def without_decoder(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Returns the class of the models of a class without the modules that decode text."""

    def initialise(model: Any, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        from torch import nn

        kind.__init__(model, config, *args, **kwargs)
        for left_out in (model.get_decoder(), model.get_output_embeddings()):
            name = next(name for name, module in model.named_modules() if module is left_out)
            model.set_submodule(name, nn.Module())
        model.all_tied_weights_keys = {}

    # transformers looks up a class by its name and its module.
    changes = {"__init__": initialise, "__module__": kind.__module__, "_tied_weights_keys": None}
    return type(kind.__name__, (kind,), changes)


def config_of_plan(folder: Path | str, given: Mapping[str, Any]) -> ModelConfig | None:
    """Returns the configuration of a model whose type has a plan, from its `config.json`; None for all others, which
    transformers reads. Raises `ModelError` for options that do not fit together, and for a model that is not served."""
    kind, named = str(given.get("model_type")), given.get("architectures")
    if not has_type(kind) or "configuration_files" in given:
        return None
    if not (name := class_of(kind)) or (named and named != [name]):
        return None
    try:
        if text_of(kind, "") and not (named and has_type(text_of(kind, text_within(given).get("model_type")))):
            return None
        config = ModelConfig.of(given)
    except ModelError as error:
        raise ModelError(f"cannot read the configuration of {folder}: {error}") from error
    if sees_later_tokens(given):
        raise not_served(folder, name, LATER_TOKENS)
    return config


def sees_later_tokens(given: Mapping[str, Any]) -> bool:
    """Returns whether a `config.json` says that tokens see those after them. Types that do not declare these options
    are refused too: whoever wrote them trained the model so."""
    return given.get("is_causal") is False or given.get("use_bidirectional_attention") is True


class _Whole:
    """A configuration of transformers' of a model with encoders, whose decoder has one of ours."""

    def __init__(self, config: PreTrainedConfig, text: ModelConfig) -> None:
        self._config, self._text = config, text

    def get_text_config(self, decoder: bool = True) -> ModelConfig:  # noqa: ARG002 (as transformers' have it)
        return self._text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def plan_config(config: PreTrainedConfig) -> Any:
    """Returns the configuration of a model for plans. The decoder's configuration is ours if its type has a plan, so it
    has only declared options. Raises `ModelError` for options that do not fit together."""
    text = config.get_text_config(decoder=True)
    if not (has_type(text.model_type) and not text_of(text.model_type, "")):
        return config
    own = ModelConfig.of(text.to_dict())
    return own if text is config else _Whole(config, own)


def transformers_config(config: ModelConfig) -> PreTrainedConfig:
    """Returns the configuration of transformers' class that says the same. Raises `ModelError` for a type that the
    installed version has no class of: its files have a plan, and no modules."""
    transformers = transformers_quietly()
    if config.model_type not in transformers.CONFIG_MAPPING:
        raise ModelError(f"transformers {transformers.__version__} has no class of {config.model_type}")
    kind = transformers.CONFIG_MAPPING[config.model_type]
    made: PreTrainedConfig = kind.from_dict(config.to_dict())
    made.get_text_config().allow_global_per_layer_attribute_access = True
    return made


def kind_of_plan(config: ModelConfig) -> ModelKind:
    """Returns the kind of a model whose type has a plan."""
    is_multimodal = config.get_text_config() is not config
    # A few decoders of text are registered among models with pictures alone.
    is_of_text = not is_multimodal and bool(class_of(config.model_type))
    loader: Any = "AutoModelForCausalLM" if is_of_text else "AutoModelForMultimodalLM"
    return ModelKind(loader, is_multimodal, has_own_generate=False)


def require_served_kind(folder: Path, config: PreTrainedConfig) -> ModelKind:
    """Returns the kind of the model in `folder`. Imports the model's code as a side effect. Raises `ModelError` for a
    model that is not a text-generating decoder, with a message that says what it is."""
    from transformers import GenerationMixin
    from transformers.models.auto import modeling_auto as registry

    if sees_later_tokens(config.to_dict()):
        raise not_served(folder, _named(config), LATER_TOKENS)
    if config.is_encoder_decoder:
        raise not_served(folder, _named(config), "an encoder–decoder model")
    named = set(config.architectures or [])
    kinds: list[tuple[Any, str]] = [
        ("AutoModelForMultimodalLM", "MODEL_FOR_MULTIMODAL_LM"),
        ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM"),
    ]
    # A class in both registries takes more than text. A configuration that names no class is taken for a text model.
    for loader, name in kinds if named else reversed(kinds):
        mapping = getattr(registry, f"{name}_MAPPING")
        if type(config) in mapping and (not named or named & _classes(name)):
            mapped = mapping[type(config)]
            classes = mapped if isinstance(mapped, tuple) else (mapped,)
            # The multimodal registry holds diffusion models and robot policies too.
            if not any(issubclass(cls, GenerationMixin) for cls in classes):
                raise not_served(folder, _named(config), "not a decoder that generates text token by token")
            has_own_generate = any(cls.generate is not GenerationMixin.generate for cls in classes)
            return ModelKind(loader, loader == "AutoModelForMultimodalLM", has_own_generate)
    is_without_head = bool(named & (_classes("MODEL") | _classes("MODEL_FOR_TEXT_ENCODING")))
    raise not_served(folder, _named(config), _EMBEDDING if is_without_head else "not a decoder model")


def _classes(registry_name: str) -> set[str]:
    """Returns the class names in a registry of transformers, such as MODEL_FOR_CAUSAL_LM."""
    from transformers.models.auto import modeling_auto as registry

    mapping = getattr(registry, f"{registry_name}_MAPPING_NAMES", {})
    return {cls for classes in mapping.values() for cls in (classes if isinstance(classes, tuple) else (classes,))}


def _named(config: PreTrainedConfig) -> str:
    return ", ".join(config.architectures or []) or str(config.model_type)


def not_served(path: Path | str, architecture: str, kind: str) -> ModelError:
    """Returns the error of a model that is not served."""
    is_or_holds = "is" if kind.startswith("not ") else "holds"
    return ModelError(
        f"{path} {is_or_holds} {kind}: {architecture}; diskprefix serves decoder models that generate text"
    )
