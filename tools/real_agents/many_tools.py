"""A server of the Model Context Protocol with thirty tools, over standard input and output.

    python many_tools.py NAME

Each tool looks up one field of a town. Claude Code and Codex offer such tools to the model only after a search.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

FIELDS = (
    *("altitude", "area", "bakeries", "bridges", "bus lines", "canals", "churches", "cinemas", "climate", "districts"),
    *("festivals", "fountains", "gardens", "harbours", "hospitals", "libraries", "mayors", "museums", "newspapers"),
    *("parks", "population", "railways", "rivers", "schools", "squares", "theatres", "towers", "tunnels", "twin towns"),
    "zoos",
)
_PROTOCOL = "2025-06-18"


def tool_of(field: str) -> str:
    """Returns the name of the tool that looks up a field."""
    return f"look_up_{field.replace(' ', '_')}"


def answer_of(field: str, town: str) -> str:
    return f"The {field} of {town} are on page {len(field) + len(town)} of the yearbook."


def tools() -> list[dict[str, Any]]:
    """Returns the tools as the protocol lists them."""
    town = {"type": "string", "description": "The name of the town, in its own language, without its country."}
    year = {"type": "integer", "minimum": 1900, "maximum": 2100, "description": "The year. Without one, the newest."}
    schema = {"type": "object", "properties": {"town": town, "year": year}, "required": ["town"]}
    return [
        {
            "name": tool_of(field),
            "description": f"Looks up the {field} of one town in the statistical yearbook, and says on which page "
            "they are. Use it only for this field; each other field of a town has a tool of its own.",
            "inputSchema": schema,
        }
        for field in FIELDS
    ]


def result_of(method: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the result of a request. Raises `KeyError` for an unknown method or tool."""
    if method == "initialize":
        server = {"name": sys.argv[1], "version": "1"}
        version = params.get("protocolVersion", _PROTOCOL)
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server}
    if method == "ping":
        return {}
    if method == "tools/list":
        return {"tools": tools()}
    if method == "tools/call":
        field = {tool_of(each): each for each in FIELDS}[params["name"]]
        return {"content": [{"type": "text", "text": answer_of(field, params["arguments"]["town"])}]}
    raise KeyError(method)


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" not in asked:
            continue
        reply = {"jsonrpc": "2.0", "id": asked["id"]}
        try:
            reply["result"] = result_of(asked["method"], asked.get("params") or {})
        except KeyError as error:
            reply["error"] = {"code": -32601, "message": f"unknown: {error}"}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
