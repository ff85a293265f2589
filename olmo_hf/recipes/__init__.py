"""What surrounds a run: the original OLMo configurations as input, plans, averages of checkpoints."""
