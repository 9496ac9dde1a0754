"""A `.gguf` file as a model. Nothing of it is written: it is read at each start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from diskprefix.progress import Report
from diskprefix.runtime.files.gguf.architecture import OF_ENCODERS, OF_PICTURES, Architecture
from diskprefix.runtime.files.gguf.gguf_file import block_of, part_paths, read_tensors
from diskprefix.runtime.files.gguf.gguf_header import FileTensor
from diskprefix.runtime.files.gguf.gguf_rope import scale_positions
from diskprefix.runtime.files.gguf.known_families import architecture_of
from diskprefix.runtime.files.gguf.metadata import Metadata
from diskprefix.runtime.files.gguf.sources import head_dim
from diskprefix.runtime.files.kinds import LATER_TOKENS, ModelKind, kind_of_plan, not_served, transformers_config
from diskprefix.runtime.files.projector import projector_beside
from diskprefix.runtime.plan.draft_layer import has_known_draft_layer
from diskprefix.runtime.plan.families.rotary import KINDS, kinds_of_rotary, rotary_of
from diskprefix.runtime.plan.model_config import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from diskprefix.runtime.files.file_matrix import MatrixPacking
    from diskprefix.runtime.files.gguf.encoders import PictureSettings
    from diskprefix.runtime.files.gguf.gguf_weights import GgufWeights
    from diskprefix.runtime.files.parameters import Source


class GgufModel(Struct, frozen=True, kw_only=True, eq=False):
    """The model in these `parts`. The last part may be an encoder; then `pictures` are the settings that prepare its
    input. `tensors` are the sources of parameters."""

    parts: list[Path]
    architecture: Architecture
    config: ModelConfig
    kind: ModelKind
    tensors: Sequence[FileTensor]
    metadata: Metadata
    pictures: PictureSettings | None = None

    @classmethod
    def read(cls, gguf: Path, report: Report, *, uses_draft_layer: bool = False) -> GgufModel:
        """Reads a file, with the encoder next to it. `uses_draft_layer`: if the file has one. Raises `ModelError` for a
        file that is damaged, not supported, or that contradicts the model; `OSError`."""
        from diskprefix.runtime.files.gguf.configuration import make_configuration, require_rotary
        from diskprefix.runtime.files.gguf.encoders import make_composite, with_encoder

        parts = part_paths(gguf)
        metadata = Metadata(*read_tensors(parts))
        if not metadata.get("attention.causal", True):
            # Such as EmbeddingGemma or GTE-Qwen2.
            raise not_served(gguf, metadata.architecture, LATER_TOKENS)
        architecture = architecture_of(metadata)
        projector = projector_beside(gguf, metadata, report)
        if projector is not None:
            architecture = with_encoder(architecture, metadata.architecture, projector.encoder)
        draft_layer = (
            metadata.draft_layer if uses_draft_layer and has_known_draft_layer(architecture.model_type) else []
        )
        metadata.require_texts()
        for fault in metadata.unusable_tokens():
            report(f"warning: {gguf.name}: {fault}; it is not used")
        if (unused := metadata.get("nextn_predict_layers", 0) - bool(draft_layer)) > 0:
            report(f"{gguf.name}: {unused} of its blocks predict further tokens, which is not used")
        config, pictures = make_configuration(architecture, metadata), None
        tensors = [*metadata.tensors.values(), *draft_layer]
        for key, name in architecture.listed.items():
            tensors += metadata.tensors_of_array(key, name)
        used = scale_positions(config, metadata, tensors)
        kind = kind_of_plan(config)
        if projector is not None:
            config, pictures = make_composite(projector.encoder, projector.metadata, config, metadata)
            kind = ModelKind("AutoModelForMultimodalLM", is_multimodal=True, has_own_generate=False)
            parts, tensors = [*parts, projector.path], [*tensors, *projector.metadata.tensors.values()]
        text = config.get_text_config(decoder=True)
        require_rotary(text, rotated_of(text), architecture, metadata)
        return cls(
            parts=parts,
            architecture=architecture,
            config=config,
            kind=replace(kind, has_draft_layer=bool(draft_layer)),
            tensors=[tensor for tensor in tensors if tensor.name not in used],
            metadata=metadata,
            pictures=pictures,
        )

    def parameters(self, kind: ModelKind, dtype: str) -> dict[str, Source]:
        """Returns functions that make the parameters of the model's modules, or of its encoder's. Raises `ModelError`
        if the file lacks tensors, or has others."""
        from diskprefix.runtime.files.parameters import parameters_of

        tensors = [tensor for tensor in self.tensors if not kind.is_encoder or tensor.name.startswith(OF_PICTURES)]
        return parameters_of(kind.skeleton(self.whole), self.architecture, tensors, dtype)

    @property
    def whole(self) -> PreTrainedConfig:
        """The configuration of transformers."""
        return transformers_config(self.config)

    def without_draft_layer(self) -> GgufModel:
        """Returns the model without its draft layer."""
        tensors = [
            tensor for tensor in self.tensors if block_of(tensor.name) < self.config.get_text_config().num_hidden_layers
        ]
        return replace(self, kind=replace(self.kind, has_draft_layer=False), tensors=tensors)

    def decoder_weights(
        self, dtype: str, packing: MatrixPacking | None = None, *, is_unread: bool = False
    ) -> GgufWeights:
        """Returns the weights of the decoder. For the arguments see `GgufWeights`."""
        from diskprefix.runtime.files.gguf.gguf_weights import GgufWeights

        own = [tensor for tensor in self.tensors if not tensor.name.startswith(OF_ENCODERS)]
        has_draft_layer = self.kind.has_draft_layer
        return GgufWeights(
            *(self.architecture, self.config, own, dtype, packing),
            has_draft_layer=has_draft_layer,
            is_unread=is_unread,
        )


def rotated_of(config: Any) -> set[int]:
    """Returns how many numbers of a head are rotated, of heads of each kind."""
    if kinds_of_rotary(config) <= KINDS.keys():
        return {2 * len(rotary.frequencies) for rotary in rotary_of(config).values()}
    return {int(head_dim(config) * config.rope_parameters.get("partial_rotary_factor", 1.0))}
