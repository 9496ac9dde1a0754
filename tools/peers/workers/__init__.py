"""Programs that run in a peer's environment. They import nothing of this project.

Each is started with the model and what else it needs, and says `{}` on a line when it can answer. Then it reads
questions, a line of JSON each, `{"prompts": [text, ...], "max_tokens": N}`, and answers each with a line: a list with,
for each prompt, `{"prompt_tokens": N, "at_s": [...]}`, the seconds from the question to each token of the reply.
"""
