"""`python -m tests.desk.umask_zero`: `diskprefix` with the umask that keeps nothing from anybody."""

import os

from diskprefix.daemon.cli import main

os.umask(0)
main()
