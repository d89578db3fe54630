"""Symmetric memory: one window per rank, every rank able to address every window.

Providers: ``shm`` (CPU ranks in processes), ``local`` (CPU ranks as threads of one process),
``torch_symm`` and ``nvshmem`` (GPUs). A kernel takes the base pointers and knows none of them.
"""
