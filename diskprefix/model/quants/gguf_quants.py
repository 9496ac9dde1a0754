"""The quantised types of GGUF files, and the form in which each is kept, number for number."""

from __future__ import annotations

from diskprefix.model.quants.quant_form import QuantForm

_FORMS = {
    "Q4_0": QuantForm(4, 32, False, "float16"),
    "Q4_1": QuantForm(4, 32, True, "float16"),
    "Q5_0": QuantForm(5, 32, False, "float16"),
    "Q5_1": QuantForm(5, 32, True, "float16"),
    "Q8_0": QuantForm(8, 32, False, "float16"),
    "Q2_K": QuantForm(2, 16, True, "nibbles"),
    "Q3_K": QuantForm(3, 16, False, "bytes"),
    "Q4_K": QuantForm(4, 32, True, "bytes"),
    "Q5_K": QuantForm(5, 32, True, "bytes"),
    "Q6_K": QuantForm(6, 16, False, "bytes"),
    "IQ1_S": QuantForm(3, 32, False, "bytes", "iq1"),
    "IQ1_M": QuantForm(3, 16, False, "bytes", "iq1"),
    "IQ2_XXS": QuantForm(3, 32, False, "bytes", "iq2"),
    "IQ2_XS": QuantForm(3, 16, False, "bytes", "iq2"),
    "IQ2_S": QuantForm(3, 16, False, "bytes", "iq2"),
    "IQ3_XXS": QuantForm(4, 32, False, "bytes", "iq3_xxs"),
    "IQ3_S": QuantForm(4, 32, False, "bytes", "iq3_s"),
    "IQ4_NL": QuantForm(4, 32, False, "float16", "iq4"),
    "IQ4_XS": QuantForm(4, 32, False, "bytes", "iq4"),
    "TQ1_0": QuantForm(2, 32, False, "shared", "ternary"),
    "TQ2_0": QuantForm(2, 32, False, "shared", "ternary"),
    "MXFP4": QuantForm(4, 32, False, "exponents", "mxfp4"),
}
"""The form that `native.packing` gives a type."""


def form_of(kind: str) -> QuantForm | None:
    """Returns the form in which weights of a type are kept; None if there is none."""
    return _FORMS.get(kind)
