"""Conversations that become too long continue without their oldest exchanges: `--prefill-compression`."""
