"""`diskprefix serve` whose engine halts in the middle of each prompt of at least HALT_AT tokens. Run as a module, like
the command."""

from __future__ import annotations

import os
import time

from diskprefix.daemon.cli import main
from diskprefix.prefixstore.cache import saving
from diskprefix.prefixstore.cache.cached_request import CachedRequest
from diskprefix.prefixstore.kv.sequence import KVSequence

if __name__ == "__main__":
    halt_at, after_step = int(os.environ["HALT_AT"]), CachedRequest.after_step
    saving._INTERIM_S, saving._INTERIM_TOKENS = 0.0, 64

    def halting(self: CachedRequest, sequence: KVSequence) -> None:
        after_step(self, sequence)
        # Bound: whoever started it kills it. As steps do, this pauses the writer.
        while sequence.num_tokens >= halt_at:
            self.cache.writer.pause_writing()
            time.sleep(0.01)

    CachedRequest.after_step = halting  # type: ignore[method-assign]
    main()
