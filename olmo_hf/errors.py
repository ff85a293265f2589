"""Errors meant for people: what was found, where, what was expected and how to mend it."""


class OlmoHfError(Exception):
    """Base of every error that a user can act on. The command line prints it without a traceback."""


class ConfigError(OlmoHfError):
    """The settings cannot be used. Carries all problems found, not only the first.

    Args:
        problems: one sentence per problem, each naming the key, the value found, what was expected and the remedy.
    """

    def __init__(self, problems: str | list[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        head = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{head} in the configuration:", *(f"  - {p}" for p in self.problems)]))


class DataError(OlmoHfError):
    """Token files, manifests, masks or text that cannot be read as promised."""


class CheckpointError(OlmoHfError):
    """A checkpoint that cannot be written, is damaged, or does not fit the run."""


class DamagedCheckpointError(CheckpointError):
    """Files of a checkpoint are not as its manifest says. An older one may be whole."""


class ConversionError(OlmoHfError):
    """A checkpoint or configuration of another program that cannot be expressed here."""


class TrainingError(OlmoHfError):
    """Training cannot go on, for example because the loss is not a number. Nothing was updated."""


def last_line(error: BaseException) -> str:
    """What an error of another package comes down to: the last line of its message, or its kind."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
