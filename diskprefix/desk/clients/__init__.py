"""The settings with which clients use the daemon, and commands for the daemons of this user."""
