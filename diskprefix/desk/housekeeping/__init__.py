"""Care of a store: `diskprefix verify`, `purge`, `compact`, `backup` and `restore`."""

PLACE = 8
COMMANDS = {
    "verify": "verify_command:verify",
    "purge": "purge_command:purge",
    "compact": "backup_command:compact",
    "backup": "backup_command:backup",
    "restore": "backup_command:restore",
}
