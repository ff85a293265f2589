"""One training step of the same work, done by each rival; `benchmarks/speed.py` runs them side by side."""
