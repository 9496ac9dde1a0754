"""The models that a daemon serves by name, and the commands that fetch, list, show and remove models."""

from __future__ import annotations

_FOLDER = "diskprefix.extras.catalogue"
COMMANDS = {
    "pull": f"{_FOLDER}.pull_command:pull",
    "list": f"{_FOLDER}.list_command:list_models",
    "show": f"{_FOLDER}.list_command:show_model",
    "rm": f"{_FOLDER}.pull_command:rm",
}
