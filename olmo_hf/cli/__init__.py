"""The shell command `olmo-hf`: one file per verb, with `HELP`, `add_arguments(parser)` and `run(namespace)`."""
