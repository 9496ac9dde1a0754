"""`export` and `import`."""

PLACE = 9
COMMANDS = {
    "export": "commands:export",
    "import": "commands:import_",
}
