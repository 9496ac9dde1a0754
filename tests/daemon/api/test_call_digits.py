"""The numbers of calls, with their own digits."""

from __future__ import annotations

import pytest

from diskprefix.daemon.api.dialect import json_text
from diskprefix.daemon.api.reply import WholeCall

NUMBERS = ["0.12345678901234567890", "123456789012345678901234567890", "1e999", "-0", "1.0", "1E5", "9007199254740993"]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_in_the_arguments_of_a_call_keeps_its_digits(number: str) -> None:
    call = WholeCall("id", "name", f'{{"a": [{number}, {{"b": {number}}}]}}')
    assert json_text(call.parsed) == f'{{"a":[{number},{{"b":{number}}}]}}'.encode()
