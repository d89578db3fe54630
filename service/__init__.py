"""The layer-execution service: Open Inference Protocol v2 over HTTP, in a process of its own.

It knows no tensor library: ``engine.Engine`` is all it asks of the ranks, and ``remote`` is that
engine over a Unix socket and shared memory.
"""
