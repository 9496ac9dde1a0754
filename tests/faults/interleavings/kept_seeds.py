"""The seeds of histories that failed once, and what each of them said.

A seed decides in which order threads continue, so it stays the history that it was until code on its way stops threads
at other places. From then on it is one more random history, and the mutant of the same protection (`mutants.py`) is
what finds the fault again. New events would change all seeds at once, so each seed has the edition of the events
(`history.EDITION`) with which it failed.
"""

from __future__ import annotations

KEPT_SEEDS: dict[int, dict[int, str]] = {
    1: {
        7300564: "health says degraded, and prompts are saved",
        7302418: "health says degraded, and prompts are saved",
        7302518: "got [253, 74], not [253, 98]",
        7302727: "found 18 tokens, and only 0 could be there for",
        7305355: "mdb_stat: Invalid argument",
        8801929: "health says degraded, and prompts are saved",
        8802628: "found 38 tokens, and only 0 could be there for",
        8802042: "health says degraded, and prompts are saved",
        8803890: "health says degraded, and prompts are saved",
    },
    2: {
        51000318: "what needs no read waits for one of another",
        51000724: "what needs no read waits for one of another",
        51000855: "what needs no read waits for one of another",
        51000931: "what needs no read waits for one of another",
        51000450: "failed: ContextTooLong('80 tokens need 1.3 KiB of KV memory, 3.8 KiB are available",
        62000102: "r8 waited 15.5 s for its turns",
        62003918: "r3 got [79] as a turn, not [36]",
        64000092: "r23 got [35, 218] as a turn, not [44, 231]",
        80007307: "got ErrorEvent(error=NotReady('the daemon is stopping')) behind its end",
        80001360: "a request waits for a read that never ends",
        110000402: "mdb_txn_begin: MDB_READERS_FULL: Environment maxreaders limit reached",
        130005700: "the memory of a tenant is gone because another one was purged",
        150002563: "the mark is gone, and a process has the file open or was killed",
        140010164: "the last step has no spares",
    },
    3: {
        180003787: "a request waits for pages that are free",
        180005130: "a request waits for pages that are free",
        170002046: "r7 found 24 tokens, and only 0 could be there for",
        210004595: "there must be something to sample from",
        240018559: "r25 got [72, 96], not [197, 178]",
        250079880: "its usage record holds a number that cannot be",
    },
}
