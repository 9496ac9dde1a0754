"""The list of architectures: `diskprefix models`."""

from __future__ import annotations

COMMANDS = {"models": "diskprefix.extras.models.models_command:models"}
