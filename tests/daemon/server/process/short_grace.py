"""`python -m tests.daemon.server.process.short_grace`: `diskprefix`, whose last requests get a second to finish."""

from diskprefix.daemon.cli import main
from diskprefix.daemon.server.process import process

process.GRACE_S = 1.0
main()
