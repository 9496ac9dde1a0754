"""What the text of a reply must be: vLLM's field, which every API takes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from diskprefix.chat.messages import JsonObject
from diskprefix.server.protocols.strict import REFUSED, Body, TextOrObject

NonEmpty: TypeAlias = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True)
class TextFormat:
    """What the text of a reply must be. `path` is where the client said so.

    `source` is JSON text of a schema, a regular expression, a grammar in Lark, or a JSON list of texts.
    """

    kind: Literal["json_schema", "json_object", "regex", "grammar", "choice"]
    source: str
    path: str

    @classmethod
    def of_json(
        cls, kind: Literal["text", "json_object", "json_schema"], schema: JsonObject | None, path: str, of_schema: str
    ) -> TextFormat | None:
        """Returns what OpenAI's formats ask for, at `path`; None for any text. `of_schema` is where a schema stands
        below it."""
        if kind == "json_schema":
            return cls(kind, json.dumps(schema), path + of_schema)
        return cls(kind, "", path) if kind == "json_object" else None


class StructuredOutputs(Body):
    """What the text of the reply must be, in the form of vLLM. Exactly one of these is given."""

    json_: TextOrObject | None = Field(default=None, alias="json", description="A JSON schema, or its text.")
    json_object: Literal[True] | None = Field(default=None, description="Any JSON object.")
    regex: NonEmpty | None = Field(default=None, description="A regular expression, in the syntax of Rust's regex.")
    choice: list[NonEmpty] | None = Field(default=None, min_length=1, description="One of these texts.")
    grammar: NonEmpty | None = Field(default=None, description="A grammar: Lark, as llguidance has it, or GBNF.")
    structural_tag: None = Field(default=None, description="Not supported.")

    @model_validator(mode="after")
    def _exactly_one(self) -> StructuredOutputs:
        given = (self.json_, self.json_object, self.regex, self.choice, self.grammar)
        if sum(value is not None for value in given) != 1:
            raise PydanticCustomError(REFUSED, "needs exactly one of json, json_object, regex, choice and grammar")
        return self

    @property
    def text_format(self) -> TextFormat:
        path = "structured_outputs"
        if self.json_ is not None:
            source = self.json_ if isinstance(self.json_, str) else json.dumps(self.json_)
            return TextFormat("json_schema", source, f"{path}.json")
        if self.regex is not None:
            return TextFormat("regex", self.regex, f"{path}.regex")
        if self.choice is not None:
            return TextFormat("choice", json.dumps(self.choice), f"{path}.choice")
        if self.grammar is not None:
            return TextFormat("grammar", self.grammar, f"{path}.grammar")
        return TextFormat("json_object", "", f"{path}.json_object")
