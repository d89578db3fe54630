"""Command line, rank entry points and benchmarks: the composition root above service and megamoe."""
