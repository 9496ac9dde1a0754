"""The list of architectures, and what a model's file holds: `diskprefix models`."""

from __future__ import annotations

COMMANDS = {"models": "diskprefix.extras.models.models_command:models"}
