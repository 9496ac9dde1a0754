"""match → restore → capture → publish: the heart.

A `PrefixCache` serves one model from one store. Each request takes a `CachedRequest` through these steps, all called
on the engine thread:

    cached = cache.begin(prompt, options)         waits until the arena is free
    restored = cached.restore(arena)              the longest stored prefix is copied into it; what to save is selected
    cached.publish(arena, logits, prefill_s)      after the first token: what the policy wants is captured and published
    report = cached.close()                       however the request ended

Capturing copies the prompt's blocks out of the arena on a thread of its own while the reply is decoded: decoding only
writes behind the prompt, and `begin` waits for the capture before the arena is used again. So saving costs nothing
until the first token, and nothing afterwards but memory bandwidth.

State enters and leaves only at grid points, so a restored run makes the same kernel calls on the same bytes as a cold
one. The exception is the end of a prompt: its partial block and next-token logits are kept, so that an exact repeat
runs no forward at all. If anything goes wrong in here the request goes on without the cache: `CachedRequest` is
the one place that turns cache errors into misses.
"""
