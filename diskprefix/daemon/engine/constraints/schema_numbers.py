"""Settles the numbers of JSON schemas for llguidance, which computes with doubles and does not always read a number as
the nearest double.

A number with a fraction or an exponent is the double that JSON parsers read; an integer has all its digits. Bounds move
inwards, so that a reply satisfies the schema both for readers of doubles and for readers of decimals. Numbers that
llguidance cannot represent get their own rule.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

from msgspec import Struct

JsonSchema: TypeAlias = dict[str, Any]

_EXACT = 2**53
"""Beyond this, doubles skip integers."""
_MAX_INTEGER = 2**63 - 1024
"""The largest double that llguidance compiles as the bound of an integer."""
_MAX_HALF_OPEN = 10**18
"""Above this, llguidance compiles no bound without another one."""
_MAX_NUMBER, _LEAST_NUMBER = 9e18, 1e-60
"""The largest double, and the smallest above zero, that llguidance compiles as the bound of a number. It nests a group
for each zero after the point."""
_MAX_PLACES = 80
"""The maximum number of digits after the point of such a bound."""
_MAX_FACTOR = 400_000_000
"""The largest `multipleOf`, without its point, that llguidance computes correctly."""
_MAX_LISTED = 256
"""The maximum number of multiples between two bounds that are written one by one."""
_MAX_RULE_DIGITS = 400
"""The maximum number of digits of a bound with its own rule. A double has at most 309 digits before its point."""
_SIGNIFICANDS, _POWERS = 2**64, 308
"""The limit for the digits of a number, as an integer, in llguidance's parser, and its largest power of ten."""
_ULPS_TRIED = 64
_SHORT_DIGITS = 15
"""Different texts with this many digits are different doubles."""
_NUMERIC = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf")
_OTHER_TYPES = ("null", "boolean", "string", "array", "object")
_NOTHING: JsonSchema = {"type": "integer", "minimum": 1, "maximum": 0}
"""A schema that no value satisfies, in a form that llguidance recognises as impossible."""


class NotKept(ValueError):
    """A schema has a number that no grammar can guarantee."""


class RuledNumbers(dict[str, Any]):
    """A schema whose numbers have their own rule. The keys are the schema of its other values; `types` are the types of
    the whole schema."""

    rule: str
    """The Lark expression of the numbers."""
    types: tuple[str, ...] | None


class _Bounds(NamedTuple):
    """The values that numeric keywords allow; with `is_integer`, only integers. None stands for no bound."""

    low: Fraction | None
    high: Fraction | None
    is_low_open: bool
    is_high_open: bool
    step: Fraction | None
    is_integer: bool

    def has(self, value: Fraction) -> bool:
        return not (
            (self.low is not None and (value < self.low or (self.is_low_open and value == self.low)))
            or (self.high is not None and (value > self.high or (self.is_high_open and value == self.high)))
            or (self.step is not None and value % self.step)
            or (self.is_integer and value.denominator != 1)
        )

    @property
    def integers(self) -> tuple[int | None, int | None]:
        """The smallest and the greatest integer within the bounds. Ignores the step."""
        low, high = self.low, self.high
        least = None if low is None else math.floor(low) + 1 if self.is_low_open else math.ceil(low)
        most = None if high is None else math.ceil(high) - 1 if self.is_high_open else math.floor(high)
        return least, most


# Spelling.


def schema_text(value: Any) -> str:
    """Returns JSON text that llguidance reads with the right value of each number, as a double or an integer."""
    # Bound: the nesting of the value.
    if isinstance(value, dict):
        members = (f"{json.dumps(key, ensure_ascii=False)}: {schema_text(part)}" for key, part in value.items())
        return f"{{{', '.join(members)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(schema_text, value))}]"
    if isinstance(value, float) and math.isfinite(value):
        return spelled(value) or repr(value)
    return json.dumps(value, ensure_ascii=False)


def spelled(value: float) -> str | None:
    """Returns a text that llguidance reads as `value`; None if the search fails.

    Its parser (serde_json without `float_roundtrip`) rounds twice: digits to a double, then the product with a power of
    ten. So it may read the shortest text of a double with 16 or 17 digits as a neighbour of this double. Then another
    text is needed.
    """
    digits, exponent = _parts_of(value)
    if _to_double(digits, exponent) == abs(value):
        return repr(value)
    exact, sign = Fraction(abs(value)), "-" if value < 0 else ""
    for power in range(exponent + 1, exponent - 22, -1):
        near = int(exact / Fraction(10) ** power)
        if not _EXACT <= near < _SIGNIFICANDS - _ULPS_TRIED * 2**11:
            continue
        ulp = int(math.ulp(float(near)))
        for number in range(_ULPS_TRIED):
            digits = near + ulp * ((number + 1) // 2) * (1 if number % 2 else -1)
            if _to_double(digits, power) == abs(value):
                return f"{sign}{digits}e{power}"
    return None


def _parts_of(value: float) -> tuple[int, int]:
    """Returns the digits and the exponent of the text of a double, without its sign."""
    _, digits, exponent = Decimal(repr(value)).as_tuple()
    return int("".join(map(str, digits))), int(exponent)


def _to_double(digits: int, exponent: int) -> float:
    """Returns the double that llguidance's parser computes for `digits` (below 2**64) times ten to the `exponent`."""
    value = float(digits)
    # Bound: twice, since exponents are above -400.
    while exponent < -_POWERS and value:
        value, exponent = value / 1e308, exponent + _POWERS
    if value == 0:
        return value
    power = float(f"1e{abs(exponent)}")
    return value * power if exponent >= 0 else value / power


def is_long(value: Any) -> bool:
    """Returns whether llguidance would write another number for a value of `const`: the value is an integer beyond the
    exact range of doubles, or a double whose text would become the digits of another integer."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) > _EXACT or (isinstance(value, float) and spelled(value) is None)


# Settling.


def settled(part: JsonSchema) -> JsonSchema:
    """Returns a schema that allows no other numbers than `part`, with bounds that llguidance can represent. Other
    numbers get a rule: see `RuledNumbers`. Does not change the schemas inside `part`. Raises `NotKept`."""
    if (bounds := _bounds_of(part)) is None:
        return part
    rest = {key: value for key, value in part.items() if key not in _NUMERIC}
    types = _types_of(part)
    if types is not None and not {"integer", "number"} & {*types}:
        return rest
    if "const" in part or isinstance(part.get("enum"), list):
        return _with_values(rest, bounds)
    numbers = _integers(bounds) if bounds.is_integer else _numbers(bounds)
    if isinstance(numbers, dict):
        return rest | numbers
    others = [name for name in (_OTHER_TYPES if types is None else types) if name not in ("integer", "number")]
    if numbers is None:
        return rest | {"type": others} if others else rest | _NOTHING
    ruled = RuledNumbers(rest | ({"type": others} if others else _NOTHING))
    ruled.rule, ruled.types = numbers, types
    return ruled


def why_impossible(part: Any) -> str:
    """Returns the reason why no number satisfies a schema, with the digits of its bounds; "" if a number does, or if a
    value of another type may."""
    if not isinstance(part, dict) or not {*(_types_of(part) or ("any",))} <= {"integer", "number"}:
        return ""
    if (bounds := _bounds_of(part)) is None or "const" in part or "enum" in part:
        return ""
    try:
        if (_integers(bounds) if bounds.is_integer else _numbers(bounds)) is not None:
            return ""
    except NotKept:
        return ""
    given = " and ".join(f"{key} {_told(part[key])}" for key in _NUMERIC if key in part)
    kind = "integer" if bounds.is_integer else "number that a double holds"
    return f"no {kind} keeps {given}"


def _told(value: Any) -> str:
    """Returns the text of a number, without an exponent if it has few digits; for an integer from 10**100 on, only the
    number of its digits."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= 1e22:
        return str(int(value))
    if isinstance(value, int) and abs(value) >= 10**100:
        return f"of {len(_digits_of(abs(value)))} digits"
    return json.dumps(value)


def _digits_of(value: int) -> str:
    """Returns the digits of an integer. If it has more digits than Python converts (4,300 by default), returns about as
    many nines: only their number is used then."""
    limit = sys.get_int_max_str_digits()
    return str(value) if value.bit_length() < 3 * limit else "9" * (value.bit_length() * 30103 // 100000)


def _types_of(part: JsonSchema) -> tuple[str, ...] | None:
    declared = part.get("type")
    if declared is None:
        return None
    return tuple(name for name in (declared if isinstance(declared, list) else [declared]) if isinstance(name, str))


def _bounds_of(part: JsonSchema) -> _Bounds | None:
    """Returns the values that the numeric keywords of a schema allow. Returns None if it has no numeric keywords, or
    one whose value has another type, which llguidance refuses."""
    given = [key for key in _NUMERIC if key in part]
    if not given or not all(_is_number(part[key]) or (key[:1] == "e" and isinstance(part[key], bool)) for key in given):
        return None
    lows, highs = list[tuple[Fraction, bool]](), list[tuple[Fraction, bool]]()
    for limits, key, other, pick in (
        (lows, "minimum", "exclusiveMinimum", max),
        (highs, "maximum", "exclusiveMaximum", min),
    ):
        plain, open_ = part.get(key), part.get(other)
        if plain is not None:
            # In draft 4 of JSON Schema, the other keyword says whether the bound is exclusive.
            limits.append((pick(_values_of(plain)), open_ is True))
        if open_ is not None and not isinstance(open_, bool):
            limits.append((pick(_values_of(open_)), True))
    low = max(lows, default=(None, False))
    high = min(highs, key=lambda limit: (limit[0], not limit[1]), default=(None, False))
    types = _types_of(part) or ("number",)
    step = abs(Fraction(Decimal(repr(part["multipleOf"])))) if "multipleOf" in part else None
    return _Bounds(low[0], high[0], low[1], high[1], step, "integer" in types and "number" not in types)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(_float(value) or 0)


def _float(value: Fraction | float) -> float | None:
    """Returns the nearest double; None beyond the largest one."""
    try:
        return float(value)
    except OverflowError:
        return None


def _values_of(value: float) -> list[Fraction]:
    """Returns the exact values of a number: its value for readers of decimals, and its value for readers of doubles
    that compare it with integers of more digits."""
    if isinstance(value, int):
        return [Fraction(value)]
    decimal = Fraction(Decimal(repr(value)))
    return [Fraction(value), decimal] if abs(value) > _EXACT else [decimal]


def _with_values(rest: JsonSchema, bounds: _Bounds) -> JsonSchema:
    """Returns a schema with only those of its values that satisfy the bounds."""
    values = [rest["const"]] if "const" in rest else list(rest["enum"])
    if "const" in rest and isinstance(rest.get("enum"), list):
        values = [value for value in values if any(_are_equal(value, other) for other in rest["enum"])]
    kept = [value for value in values if not _is_number(value) or all(map(bounds.has, _values_of(value)))]
    rest = {key: value for key, value in rest.items() if key not in ("const", "enum")}
    return rest | {"enum": kept} if kept else rest | _NOTHING


def _are_equal(value: Any, other: Any) -> bool:
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _integers(bounds: _Bounds) -> JsonSchema | str | None:
    """Returns the keywords, or the rule, of the integers within bounds; None if there are none."""
    low, high = bounds.integers
    # An integer is a multiple of 1.5 if and only if it is a multiple of 3.
    step = bounds.step.numerator if bounds.step else 1
    low = None if low is None else -(-low // step) * step
    high = None if high is None else high // step * step
    if low is not None and high is not None and low > high:
        return None
    keywords: JsonSchema = {} if step == 1 else {"multipleOf": step}
    is_factor = step <= _MAX_FACTOR
    least = None if low is None else _integer_bound(low, 1, step)
    most = None if high is None else _integer_bound(high, -1, step)
    is_held = (
        (least is None or most is None or least <= most)
        and (least is None or least <= _MAX_INTEGER)
        and (most is None or most >= -_MAX_INTEGER)
        and not (most is None and least is not None and least >= _MAX_HALF_OPEN)
        and not (least is None and most is not None and most <= -_MAX_HALF_OPEN)
        and is_factor
        and (step == 1 or least is None or most is None or _has_multiple(least, most, step))
    )
    if is_held:
        if least is not None:
            keywords["minimum"] = least
        if most is not None:
            keywords["maximum"] = most
        return keywords
    if step == 1:
        return _range_rule(_decimal(low), _decimal(high), fraction=False)
    return _listed(Fraction(low) if low is not None else None, Fraction(high) if high is not None else None, step)


def _has_multiple(low: int, high: int, step: int) -> bool:
    return -(-low // step) * step <= high


def _integer_bound(bound: int, sign: int, step: int) -> int:
    """Returns a bound, which is a multiple of `step`, as a double: the nearest double if it is less than `step` away,
    so that no other multiple lies in between; otherwise the next double inwards. A bound too far inwards for llguidance
    is returned unchanged."""
    if abs(bound) <= _EXACT:
        return bound
    if bound * sign < -_MAX_INTEGER:
        return -_MAX_INTEGER * sign
    if bound * sign > _MAX_INTEGER:
        # This bound gets a rule.
        return bound
    nearest = float(bound)
    if abs(int(nearest) - bound) < step:
        return int(nearest)
    return int(nearest if (int(nearest) - bound) * sign >= 0 else math.nextafter(nearest, math.inf * sign))


def _numbers(bounds: _Bounds) -> JsonSchema | str | None:
    """Returns the keywords, or the rule, of the numbers within bounds; None if there are none.

    An exclusive bound becomes the next double: every reader distinguishes the decimals beyond it from the bound. A
    bound with few digits may stay exclusive: see `_open_ended`.
    """
    if bounds.step:
        return _multiples(bounds)
    low, high = _next_double(bounds.low, bounds.is_low_open, 1), _next_double(bounds.high, bounds.is_high_open, -1)
    if math.nan in (low, high) or (low is not None and high is not None and not low <= high):
        return _long_integers(bounds)
    least, most = _held(low, high)
    if least is not False and most is not False:
        return _open_ended(_keywords(least, most), bounds, low, high)
    return _range_rule(_decimal(low), _decimal(high), fraction=True)


def _open_ended(keywords: JsonSchema, bounds: _Bounds, low: float | None, high: float | None) -> JsonSchema:
    """Returns the keywords with a short exclusive bound away from zero unchanged. For a maximum, llguidance does not
    accept a prefix of its digits: with the double next to 1, it accepts 0.90 but not 0.9. So a short bound stays as it
    is. The price is that decimals nearer to the bound than to the double next to it are accepted, such as
    0.99999999999999999."""
    for key, sign, bound, is_open, double in (
        ("minimum", -1, bounds.low, bounds.is_low_open, low),
        ("maximum", 1, bounds.high, bounds.is_high_open, high),
    ):
        if bound is None or not is_open or bound * sign <= 0 or keywords[key] != double:
            continue
        near = _float(bound)
        if near is not None and _held(near, near) == (near, near) and _is_short(near) and [bound] == _values_of(near):
            del keywords[key]
            keywords[f"exclusive{key.capitalize()}"] = near
    return keywords


def _is_short(value: float) -> bool:
    digits, _ = _parts_of(value)
    return len(str(digits)) <= _SHORT_DIGITS


def _keywords(low: float | None, high: float | None) -> JsonSchema:
    return {key: bound for key, bound in (("minimum", low), ("maximum", high)) if bound is not None}


def _long_integers(bounds: _Bounds) -> JsonSchema | str | None:
    """Returns the rule of the integers within bounds that contain no double."""
    least, most = bounds.integers
    if least is not None and most is not None and least > most:
        return None
    return _range_rule(_decimal(least), _decimal(most), fraction=False)


def _next_double(bound: Fraction | None, is_open: bool, sign: int) -> float | None:
    """Returns the first double within a bound, for all readers; NaN if there is none."""
    if bound is None:
        return None
    if (near := _float(bound)) is None:
        # If the bound lies beyond all doubles, it either excludes none of them or all of them.
        return -sys.float_info.max * sign if bound * sign < 0 else math.nan
    value = math.nextafter(near, -math.inf * sign)
    # Bound: the bound lies among the next doubles.
    for _ in range(8):
        if not math.isfinite(value):
            value = math.nextafter(value, math.inf * sign)
            continue
        distances = [(read - bound) * sign for read in _values_of(value)]
        if min(distances) > 0 or (min(distances) == 0 and not is_open):
            return value + 0.0
        value = math.nextafter(value, math.inf * sign)
    return math.nan


def _held(low: float | None, high: float | None) -> tuple[Any, Any]:
    """Returns bounds, moved inwards as far as llguidance needs. False stands for a bound that would exclude too
    much."""
    least, most = low, high
    if low is not None and abs(low) < _LEAST_NUMBER and low != 0:
        least = _LEAST_NUMBER if low > 0 else 0.0
    if high is not None and abs(high) < _LEAST_NUMBER and high != 0:
        most = -_LEAST_NUMBER if high < 0 else 0.0
    if least is not None and least < -_MAX_NUMBER:
        least = -_MAX_NUMBER
    if most is not None and most > _MAX_NUMBER:
        most = _MAX_NUMBER
    least, most = _with_places(least, 1), _with_places(most, -1)
    if least is not None and (least > _MAX_NUMBER or (high is None and least >= _MAX_HALF_OPEN)):
        return False, most
    if most is not None and (most < -_MAX_NUMBER or (low is None and most <= -_MAX_HALF_OPEN)):
        return least, False
    if least is not None and most is not None and least > most:
        return False, False
    return least, most


def _with_places(bound: float | None, sign: int) -> float | None:
    """Returns the next bound inwards that llguidance reads exactly and that has few digits after the point."""
    if bound is None:
        return None
    # Bound: one of the next two doubles has a spelling.
    for _ in range(_ULPS_TRIED):
        if spelled(bound) is not None and -_parts_of(bound)[1] <= _MAX_PLACES:
            return bound
        bound = math.nextafter(bound, math.inf * sign)
    return bound


def _multiples(bounds: _Bounds) -> JsonSchema | str | None:
    """Returns the keywords, or the values, of the multiples within bounds; None if there are none."""
    step = bounds.step
    assert step is not None
    low = None if bounds.low is None else math.ceil(bounds.low / step) * step
    high = None if bounds.high is None else math.floor(bounds.high / step) * step
    low = low + step if low is not None and low == bounds.low and bounds.is_low_open else low
    high = high - step if high is not None and high == bounds.high and bounds.is_high_open else high
    if low is not None and high is not None and low > high:
        return None
    factor = _factor(step)
    least, most = _next_double(low, False, 1), _next_double(high, False, -1)
    if factor is not None and _held(least, most) == (least, most) and _is_seen(least, most, float(step)):
        return _keywords(least, most) | {"multipleOf": factor}
    return _listed(low, high, step)


def _is_seen(low: float | None, high: float | None, step: float) -> bool:
    """Returns whether llguidance, which divides doubles, finds a multiple between two bounds."""
    return low is None or high is None or math.ceil(low / step) * step <= math.floor(high / step) * step


def _factor(step: Fraction) -> float | None:
    """Returns the double that llguidance converts to exactly the decimal of a step; None if there is none. It
    multiplies by ten until no digit is after the point, and rounds each time."""
    near = _float(step)
    if not near:
        return None
    for number in range(_ULPS_TRIED):
        value, places = near + math.ulp(near) * ((number + 1) // 2) * (1 if number % 2 else -1), 0
        scaled = value
        # Bound: doubles from 2**53 on are integers.
        while scaled % 1 and places < _POWERS:
            scaled, places = scaled * 10, places + 1
        if scaled <= _MAX_FACTOR and Fraction(int(scaled), 10**places) == step and spelled(value) is not None:
            return value
    return None


def _listed(low: Fraction | None, high: Fraction | None, step: Fraction | int) -> str:
    """Returns the rule of the multiples of `step` from `low` to `high`. Raises `NotKept` for too many."""
    if low is None or high is None or (high - low) / step >= _MAX_LISTED:
        raise NotKept(f"multipleOf {_told(_plain(step))} has too many digits for a grammar")
    count = int((high - low) / step) + 1
    return f"({' | '.join(json.dumps(_decimal_text(low + number * step)) for number in range(count))})"


def _plain(value: Fraction | int) -> float | int:
    return int(value) if value == int(value) else float(value)


def _decimal_text(value: Fraction) -> str:
    """Returns the digits of a number with finitely many decimal places, without an exponent."""
    scale = 0
    # Bound: the value has no more decimal places than a step and a bound, which have few.
    while value.denominator != 1 and scale < 2 * _MAX_RULE_DIGITS:
        value, scale = value * 10, scale + 1
    digits = str(abs(value.numerator)).rjust(scale + 1, "0")
    whole, places = (digits[:-scale], digits[-scale:]) if scale else (digits, "")
    return f"{'-' if value < 0 else ''}{whole}{'.' if places else ''}{places}"


# Rules.


class _Digits(Struct, frozen=True):
    """The digits of a number before and after its point, without its sign and without zeros at the ends."""

    whole: str
    places: str


def _decimal(value: float | None) -> Fraction | None:
    return None if value is None else _values_of(value)[-1]


def _digits(value: Fraction) -> _Digits:
    whole, _, places = _decimal_text(abs(value)).partition(".")
    return _Digits(whole, places.rstrip("0"))


def _range_rule(low: Fraction | None, high: Fraction | None, *, fraction: bool) -> str:
    """Returns the expression of all numbers between two bounds, without exponents; with digits after the point if
    `fraction`."""
    for bound in (low, high):
        if bound is not None and len(_digits_of(int(abs(bound)))) > _MAX_RULE_DIGITS:
            raise NotKept(f"a bound has more than {_MAX_RULE_DIGITS} digits")
    choices = list[str]()
    if low is None or low < 0:
        nearest = None if high is None or high >= 0 else -high
        choices.append(_positive(nearest, None if low is None else -low, fraction, "-"))
    if high is None or high >= 0:
        choices.append(_positive(None if low is None or low <= 0 else low, high, fraction, ""))
    return f"({' | '.join(choices)})"


def _positive(low: Fraction | None, high: Fraction | None, fraction: bool, sign: str) -> str:
    """Returns the expression of numbers from `low` to `high`, both at least zero, after `sign`."""
    places = r"(\.[0-9]+)?" if fraction else ""
    limits = []
    if low is not None:
        limits.append("|".join(_at_least(_digits(low), places)))
    if high is not None:
        limits.append("|".join(_at_most(_digits(high), places)))
    patterns = limits or [rf"(0|[1-9][0-9]*){places}"]
    return " & ".join(f"/{sign}({pattern})/" for pattern in patterns)


def _at_least(bound: _Digits, places: str) -> Iterator[str]:
    whole, behind = bound.whole, bound.places
    # More digits, or a greater digit at some place.
    more = 1 if whole == "0" else len(whole)
    yield f"[1-9][0-9]{{{more},}}{places}" if whole != "0" else f"[1-9][0-9]*{places}"
    for at, digit in enumerate(whole if whole != "0" else ""):
        if digit != "9":
            yield f"{_run(whole[:at])}[{int(digit) + 1}-9][0-9]{{{len(whole) - at - 1}}}{places}"
    if not behind:
        yield f"{_run(whole)}{places}"
        return
    for at, digit in enumerate(behind):
        if digit != "9":
            yield rf"{_run(whole)}\.{_run(behind[:at])}[{int(digit) + 1}-9][0-9]*"
    yield rf"{_run(whole)}\.{_run(behind)}[0-9]*"


def _at_most(bound: _Digits, places: str) -> Iterator[str]:
    whole, behind = bound.whole, bound.places
    # Fewer digits, or a smaller digit at some place.
    if len(whole) > 1:
        yield f"(0|[1-9][0-9]{{0,{len(whole) - 2}}}){places}"
    for at, digit in enumerate(whole):
        least = 1 if at == 0 and len(whole) > 1 else 0
        if int(digit) > least:
            yield f"{_run(whole[:at])}[{least}-{int(digit) - 1}][0-9]{{{len(whole) - at - 1}}}{places}"
    if not places:
        yield _run(whole)
        return
    yield rf"{_run(whole)}(\.0+)?"
    for at, digit in enumerate(behind):
        if digit != "0":
            yield rf"{_run(whole)}\.{_run(behind[:at])}[0-{int(digit) - 1}][0-9]*"
            yield rf"{_run(whole)}\.{_run(behind[: at + 1])}0*"


def _run(digits: str) -> str:
    """Returns the pattern of digits, with long runs of zeros shortened."""
    stripped = digits.rstrip("0")
    head = stripped.lstrip("0")
    zeros, tail = len(stripped) - len(head), len(digits) - len(stripped)
    return f"{_zeros(zeros)}{head}{_zeros(tail)}"


def _zeros(number: int) -> str:
    return "0" * number if number < 5 else f"0{{{number}}}"
