"""OLMo-2 pretraining, native to the Hugging Face stack."""
