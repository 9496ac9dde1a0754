"""`tools/vllm`: the connector in a real vLLM."""
