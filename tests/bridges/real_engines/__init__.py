"""`tests/bridges/real-engines`: the connector in a real vLLM."""
