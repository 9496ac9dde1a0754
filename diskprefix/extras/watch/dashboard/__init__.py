"""What people watch: a page at `/`, and the JSON from which it and `diskprefix top` are made."""
