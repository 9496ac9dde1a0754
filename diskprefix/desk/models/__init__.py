"""The models that a daemon serves by name: commands that fetch, list, show and remove them."""

PLACE = 1
COMMANDS = {
    "pull": "pull_command:pull",
    "list": "list_command:list_models",
    "show": "list_command:show_model",
    "rm": "pull_command:rm",
}
