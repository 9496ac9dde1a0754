"""Records requests, without their text."""
