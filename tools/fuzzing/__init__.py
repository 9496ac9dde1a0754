"""`tools/fuzz`: libFuzzer and Atheris over what reads bytes that others may have written, and over the operators."""
