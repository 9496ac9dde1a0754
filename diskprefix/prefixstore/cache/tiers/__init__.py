"""The places that state is kept in, from the nearest to the farthest. README.md has the picture."""
