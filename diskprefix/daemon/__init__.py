"""The daemon: from HTTP to tokens and back."""
