"""What is released: the wheels and the source archive, and a fresh machine that they are tried on."""
