"""The base of all bodies, and what pydantic needs to name the place of an error."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    GetCoreSchemaHandler,
    Tag,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import CoreSchema

from diskprefix.chat.messages import JsonObject

REFUSED = "refused"
"""The type of errors whose message says all, and must not be completed with the value at fault."""


def _fail_fast(schema: Any) -> None:
    """Has each list and each object of any keys in a schema of pydantic's end with its first error."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "dict"):
            schema["fail_fast"] = True
        for part in schema.values():
            _fail_fast(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _fail_fast(part)


class Body(BaseModel):
    """A JSON object that is read strictly: "5" is not taken for 5, nor true for 1, and NaN is refused.

    Its lists and objects are read up to the first error: an error takes two kilobytes, and only one is told.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema


def _as_sent(value: JsonObject, check: ValidatorFunctionWrapHandler) -> JsonObject:
    check(value)
    return value


AS_SENT = WrapValidator(_as_sent)
"""Has an object checked, but kept as the client's dict, because the order of its keys is part of the prompt."""


def by_json_type(expected: str) -> Discriminator:
    """Chooses a member of a union by the JSON type of the value: `~text`, `~list` or `~object`.

    `expected` completes the error for other types: "must be ...".
    """
    tags: dict[type, str] = {str: "~text", list: "~list", dict: "~object"}
    return Discriminator(
        lambda value: tags.get(type(value)),
        custom_error_type="type",
        custom_error_message=f"Input should be {expected}",
    )


def by_type(*types: str, expected: str, other: str | None = None) -> Discriminator:
    """Chooses a member of a union by the field `type` of an object: `~` and the type, or `other` for types not listed.

    `expected` completes the error if there is no such member: "must be ...".
    """

    def tag(value: object) -> str | None:
        if not isinstance(value, dict):
            return None
        kind = value.get("type")
        return f"~{kind}" if kind in types else other

    return Discriminator(tag, custom_error_type="type", custom_error_message=f"Input should be {expected}")


TextOrObject: TypeAlias = Annotated[
    Annotated[str, Tag("~text")] | Annotated[JsonObject, Tag("~object")],
    by_json_type("JSON text or an object"),
]
