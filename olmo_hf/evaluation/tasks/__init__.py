"""Downstream tasks as tables: labels, prompts and where their documents lie; and what turns them into questions."""
