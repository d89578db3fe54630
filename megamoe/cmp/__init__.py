"""The attention-pre graph as eleven kernels: CUDA graphs with branches and programmatic edges."""
