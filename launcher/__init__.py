"""Command line, rank entry points and benchmarks; the composition root of the project."""
