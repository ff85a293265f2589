"""The metric of downstream tasks as a module of `evaluate`: `evaluate.load(PATH_OF_THIS_FOLDER)`."""
