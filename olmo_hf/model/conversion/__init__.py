"""Between the original OLMo trainer's checkpoints and Hugging Face ones."""
