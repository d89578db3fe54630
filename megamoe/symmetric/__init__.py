"""Symmetric memory: one window per rank, every rank able to address every window.

Providers: ``shm`` (CPU ranks in processes) and ``local`` (CPU ranks as threads of one process);
``torch_symm`` and ``nvshmem`` (GPU ranks in processes) and ``device`` (GPU ranks as threads of one
process). A kernel takes the base pointers and knows none of them.
"""
