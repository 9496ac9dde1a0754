"""A model whose matrices have the quants of a `.gguf` file.

transformers puts `QuantisedLinear` in the place of modules, and `QuantisedExperts` in that of experts, before it loads
the tensors, through its own interface for quantisers.
"""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from diskprefix.model.load.memory import one_thread
from diskprefix.model.quants.expert_matrices import is_mixture
from diskprefix.model.quants.file_matrix import FileMatrix, in_order, regrouped
from diskprefix.model.quants.forms import compiled, matrix_of, weights_of
from diskprefix.model.quants.quant_form import QuantForm
from diskprefix.model.quants.quantised_experts import QuantisedExperts, QuantisedMatrices
from diskprefix.native.matrix import Matrix, product, rows_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

log = logging.getLogger("diskprefix")

METHOD = "diskprefix"
_SCALE = "scalar_embed_scale"
"""The attribute of embeddings that are multiplied, in transformers."""


class QuantisedLinear(nn.Module):
    """A replacement for `nn.Linear`: rows [.., in_features] → [.., out_features], in bfloat16."""

    packed: torch.Tensor

    def __init__(self, linear: nn.Linear, form: QuantForm) -> None:
        """The quants come by `take_matrices`."""
        super().__init__()
        self.in_features, self.out_features, self.form = linear.in_features, linear.out_features, form
        packed = torch.empty(0, dtype=torch.uint8, device=linear.weight.device)
        self.register_buffer("packed", packed, persistent=False)
        self.bias = linear.bias
        self.columns: tuple[int, int, int] | None = None
        """As that of `FileMatrix`."""
        self.in_file: Matrix | None = None
        """The matrix with its columns in the order of the file."""
        self.matrix: Matrix | None = None
        """The matrix, if its columns are in the order of the rows that the module gets."""
        self._product: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def weight(self) -> torch.Tensor:
        """The weights as they are computed with, made anew each time."""
        if not self.packed.numel():
            # Mamba 2 gives it random numbers before those of the file are there.
            return torch.empty(self.out_features, self.in_features, device="meta")
        return in_order(weights_of(self.packed, self.form), self.columns)

    def prepare(self) -> None:
        """Prepares the matrix for the kernel, once the weights are there. They must not change afterwards."""
        bias = None if self.bias is None else self.bias.detach()
        self.in_file = matrix_of(self.packed, self.form, bias)
        self.matrix = self.in_file if self.columns is None else None
        self._product = partial(product, compiled(), matrix=self.in_file)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        assert self._product is not None, "the model was not prepared"
        if self.columns is not None:
            # The inputs move, not the columns: quants cannot.
            rows = regrouped(rows, *self.columns)
        return self._product(rows)


class QuantisedEmbedding(nn.Module):
    """A replacement for `nn.Embedding` whose rows are in a `.gguf` file: ids, int64 [..] → bfloat16 [.., width]."""

    packed: torch.Tensor

    def __init__(self, embedding: nn.Embedding, form: QuantForm) -> None:
        super().__init__()
        self.form = form
        self.register_buffer("packed", torch.empty(0, dtype=torch.uint8), persistent=False)
        self.matrix: Matrix | None = None
        # Gemma multiplies the rows.
        self._scale: float | None = getattr(embedding, _SCALE, None)

    @property
    def weight(self) -> torch.Tensor:
        """The weights without the scale, made anew each time."""
        return weights_of(self.packed, self.form)

    def prepare(self) -> None:
        """Prepares the matrix for the operators, once the weights are there. They must not change afterwards."""
        self.matrix = matrix_of(self.packed, self.form, None)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        assert self.matrix is not None, "the model was not prepared"
        rows = rows_of(compiled(), self.matrix, ids)
        return rows if self._scale is None else rows * torch.tensor(self._scale).to(rows.dtype)


def is_plain_embedding(module: nn.Module) -> bool:
    """Returns whether `QuantisedEmbedding` computes what a module computes."""
    return type(module) is nn.Embedding or (isinstance(module, nn.Embedding) and hasattr(module, _SCALE))


def in_decoder(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules of the decoder with their names, and the one that gives the logits. Without the matrix of
    latent attention that is multiplied from both sides: it is small."""
    inside = {id(module) for module in model.get_decoder().modules()} | {id(model.get_output_embeddings())}
    for name, module in model.named_modules():
        if id(module) in inside and not name.endswith("kv_b_proj"):
            yield name, module


def describe(config: PreTrainedConfig, forms: Mapping[str, QuantForm]) -> None:
    """Tells transformers which modules have quants, and which kernels compute with them. This goes into the identity of
    the model. Raises `ModelError` without the compiled operators."""
    # transformers makes a `QuantsConfig` of it.
    config.quantization_config = {"quant_method": METHOD, "kernel": compiled().identity, "forms": forms}


def untie(config: PreTrainedConfig) -> None:
    """Says in a configuration that the matrix of the logits is not that of the embeddings."""
    for one in (config, config.get_text_config(decoder=True)):
        one.tie_word_embeddings = False


def replace_modules(model: PreTrainedModel, forms: Mapping[str, QuantForm]) -> None:
    """Puts modules that wait for quants in the place of those that have a form."""
    experts: dict[str, dict[str, QuantForm]] = defaultdict(dict)
    for name, form in forms.items():
        owner, _dot, part = name.rpartition(".")
        module = model.get_submodule(owner if owner and is_mixture(model.get_submodule(owner)) else name)
        if is_mixture(module):
            experts[owner][part] = form
        elif isinstance(module, nn.Embedding):
            model.set_submodule(name, QuantisedEmbedding(module, form))
        else:
            model.set_submodule(name, QuantisedLinear(module, form))
    for name, of_parts in experts.items():
        model.set_submodule(name, QuantisedExperts(model.get_submodule(name), of_parts))
    tied = model.all_tied_weights_keys
    model.all_tied_weights_keys = {
        name: source for name, source in tied.items() if name.removesuffix(".weight") not in forms
    }
    if model.all_tied_weights_keys != tied:
        untie(model.config)


def take_matrices(
    model: PreTrainedModel, matrices: Mapping[str, FileMatrix], packed: Mapping[Hashable, torch.Tensor]
) -> None:
    """Gives the modules that wait for matrices of a `.gguf` file those that are packed, by their keys."""
    for name, matrix in matrices.items():
        module = model.get_submodule(name)
        assert isinstance(module, QuantisedLinear | QuantisedEmbedding | QuantisedMatrices)
        module.packed = packed[matrix.key]
        if isinstance(module, QuantisedLinear):
            module.columns = matrix.columns


def prepare(model: PreTrainedModel) -> None:
    """Makes a loaded model ready to compute, and logs which matrices are quantised."""
    found: dict[str, int] = {}
    with one_thread():
        for module in model.modules():
            if isinstance(module, QuantisedLinear | QuantisedMatrices):
                kind = module.form.kind
                found[kind] = found.get(kind, 0) + (len(module.packed) if isinstance(module, QuantisedMatrices) else 1)
            if isinstance(module, QuantisedLinear | QuantisedEmbedding | QuantisedExperts):
                module.prepare()
    others = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    if found:
        counts = ", ".join(f"{count} matrices {kind}" for kind, count in sorted(found.items()))
        left = f"; {len(others)} as they are, for example {others[0]}" if others else ""
        log.info("[model] weights: %s%s", counts, left)


@register_quantization_config(METHOD)
class QuantsConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """That a model is quantised so, and which kernel computes its products. `forms` are those of its modules."""

    def __init__(self, *, kernel: str, forms: Mapping[str, QuantForm], **_: Any) -> None:
        self.quant_method = METHOD
        self.kernel, self.forms = kernel, forms

    def to_dict(self) -> dict[str, Any]:
        """Returns what goes into the identity of the model: which modules have which form decides its numbers."""
        forms = sorted(f"{name} {form}" for name, form in self.forms.items())
        digest = hashlib.sha256("\n".join(forms).encode()).hexdigest()
        return {"quant_method": METHOD, "kernel": self.kernel, "forms": digest}


@register_quantizer(METHOD)
class Quantiser(HfQuantizer):  # type: ignore[misc]
    """Puts quantised modules where the weights have quants."""

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        replace_modules(model, self.quantization_config.forms)

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False
