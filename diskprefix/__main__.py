"""`python -m diskprefix` is the `diskprefix` command."""

from diskprefix.daemon.cli import main

if __name__ == "__main__":
    main()
