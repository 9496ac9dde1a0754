"""The release: the wheels and the source archive, and a fresh machine to try them on."""
