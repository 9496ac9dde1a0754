"""A conversation with the model: the page `/chat`, and `diskprefix run` and `chat` in a terminal."""

PLACE = 3
COMMANDS = {
    "run": "run_command:run",
    "chat": "chat_command:chat",
}
PAGES = {"/chat": "chat_page:CHAT_PAGE"}
