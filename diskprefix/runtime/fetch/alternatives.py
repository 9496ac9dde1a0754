"""The refusal of a model that does not fit, and which other files of it would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from diskprefix.errors import ModelError
from diskprefix.runtime.fetch.embedded import EMBEDDED
from diskprefix.runtime.fetch.hub import listing_of
from diskprefix.runtime.fetch.named_model import own_path
from diskprefix.runtime.files.fit import Fit, ModelNeeds, fitted, needs_of_gguf
from diskprefix.runtime.runtime_options import RuntimeOptions

_MOST_OTHERS = 8
"""Other files whose headers are read."""


def require_fit(needs: ModelNeeds, free_bytes: int, settings: RuntimeOptions) -> Fit:
    """Returns how the model of `settings` fits, with its KV memory. Raises `ModelError` if it does not."""
    fit_of_needs = fitted(needs, free_bytes, settings.kv_memory)
    if not fit_of_needs.is_enough:
        raise ModelError(fit_of_needs.refusal(other_forms(settings)))
    return fit_of_needs


def other_forms(settings: RuntimeOptions) -> Iterator[tuple[str, ModelNeeds]]:
    """Yields what else may be made of the model that `settings` name, each with how it is asked for: other files
    in the folder of a `.gguf` file or in the repository. What cannot be read is left out."""
    is_plain = settings.dtype in ("auto", "bfloat16") and settings.device in ("auto", "cpu")
    if settings.model is None or settings.model == EMBEDDED.name or not is_plain:
        return
    path = own_path(settings.model)
    if path is None:
        listing = listing_of(settings.model)
        yield from () if listing is None else listing.other_forms()
    elif path.is_file() and path.suffix:
        others = sorted(path.parent.glob(f"*{path.suffix}"), key=lambda other: -other.stat().st_size)
        smaller = [other for other in others if other.stat().st_size < path.stat().st_size]
        for other in smaller[:_MOST_OTHERS]:
            with suppress(ModelError, OSError, ValueError, KeyError):
                yield f"the file {other.name}", needs_of_gguf(other, "auto")
