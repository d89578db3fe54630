"""HTTP layer service: imports neither torch nor cuda; it talks to an engine protocol."""
