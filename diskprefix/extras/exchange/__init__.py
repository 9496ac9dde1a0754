"""Saved prompts as files: `diskprefix export` and `diskprefix import`."""

from __future__ import annotations

COMMANDS = {
    "export": "diskprefix.extras.exchange.commands:export",
    "import": "diskprefix.extras.exchange.commands:import_",
}
