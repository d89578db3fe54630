"""Backends: the same session over CPU ranks and over GPUs."""
