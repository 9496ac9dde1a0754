"""Care of a store: `diskprefix verify`, `purge`, `compact`, `backup` and `restore`."""

from __future__ import annotations

COMMANDS = {
    "verify": "diskprefix.extras.housekeeping.verify_command:verify",
    "purge": "diskprefix.extras.housekeeping.purge_command:purge",
    "compact": "diskprefix.extras.housekeeping.backup_command:compact",
    "backup": "diskprefix.extras.housekeeping.backup_command:backup",
    "restore": "diskprefix.extras.housekeeping.backup_command:restore",
}
