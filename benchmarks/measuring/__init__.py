"""What several benchmarks share: what a figure was measured on, and counting instead of timing."""
