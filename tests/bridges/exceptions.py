"""What conventions except of the bridges: see `tests.exceptions`."""

SKIPPED = {
    "could not import 'vllm'": "it has an environment of its own: `tests/bridges/real-engines theirs` runs these",
    "LMCache is not installed": "likewise: `tests/bridges/real-engines lmcache`",
    "SGLang is not installed": "likewise: `tests/bridges/real-engines sglang`",
}
READ_WITHOUT_A_DAEMON = {"bridges/shared/step_orders.py": "vLLM's process"}
FOREIGN_NAMES = dict.fromkeys(
    (
        *("bridges.vllm.connector", "bridges.vllm.offload_tier"),
        *("bridges.lmcache.l2_adapter", "bridges.sglang.hicache_backend"),
    ),
    "members of an engine's base class",
)
NAME_SCOPES = {"diskprefix/bridges/vllm/README.md": "`disk_prefix_cache` of a request"}
NOT_RUN = {r"python -m vllm": "vLLM is not installed here; tests/bridges/real-engines does it"}
PAST_THE_FACE = {"bridges": 30}
