"""Oracles: the mathematics of each layer in readable torch on the CPU, and nothing else."""
