"""Saved prompts as files: `diskprefix export` and `diskprefix import`."""

from __future__ import annotations

COMMANDS = {
    "export": "diskprefix.extras.exchange.export_command:export",
    "import": "diskprefix.extras.exchange.import_command:import_",
}
