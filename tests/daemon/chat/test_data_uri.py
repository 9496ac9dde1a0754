"""Pictures in base64 as clients write it: every form gives the same content, and a wrong one is a 400 that says why."""

from __future__ import annotations

import base64
import random
from collections.abc import Callable
from urllib.parse import quote

import pytest

from diskprefix.daemon.chat.data_uri import content_of, data_uri
from diskprefix.errors import InvalidRequest

CONTENT = random.Random(0).randbytes(1000) + b"\xfb\xff\xfe"


def in_lines(text: str, end: str = "\n") -> str:
    return end.join(text[begin : begin + 76] for begin in range(0, len(text), 76)) + end


FORMS: dict[str, Callable[[str], str]] = {
    "as it is": lambda data: data,
    "in lines, as base64 writes it": in_lines,
    "in lines of another system": lambda data: in_lines(data, "\r\n"),
    "without padding": lambda data: data.rstrip("="),
    "of URLs": lambda data: data.replace("+", "-").replace("/", "_"),
    "of URLs without padding": lambda data: data.replace("+", "-").replace("/", "_").rstrip("="),
    "percent-encoded": lambda data: quote(data, safe=""),
    "in lines, percent-encoded": lambda data: quote(in_lines(data)),
    "with blanks around": lambda data: f"  {data}\n",
}
"""What clients make of base64."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_bytes", [1000, 1001, 1002, 1003])
@pytest.mark.parametrize("scheme", ["data:image/png;base64,", " data:image/png;base64,", "DATA:;BASE64,"])
def test_each_form_of_base64_gives_the_content(form: str, num_bytes: int, scheme: str) -> None:
    content = CONTENT[-num_bytes:]
    assert content_of(scheme + FORMS[form](base64.b64encode(content).decode()), "image") == content


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("a*b=", r"letters that base64 has not \(\*\)"),
        ("abc!\u00e4defg", r"letters that base64 has not \(!, ä\)"),
        ("ab=c", r"\(=\)"),
        ("a%zzb", r"\(%\)"),
        ("ab\x00cd", r"\(U\+0000\)"),
        ("abcde", "5 letters do not make whole bytes; it may be cut off"),
    ],
)
def test_invalid_base64_is_a_400_that_names_the_letters(data: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        content_of(f"data:image/png;base64,{data}", "messages.0.content.0")
    assert caught.value.param == "messages.0.content.0"
    assert caught.value.message.isprintable()


def test_a_data_uri_where_the_api_wants_base64_is_taken() -> None:
    written = base64.b64encode(CONTENT).decode()
    assert data_uri("image/png", written) == data_uri("image/gif", f"data:image/png;base64,{written}")
