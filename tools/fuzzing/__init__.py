"""`tools/fuzz`: libFuzzer and Atheris on the readers of foreign bytes, and on the operators."""
