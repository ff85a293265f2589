"""The promises of this project, and for each the commands that try it and how their figures are read."""

from dataclasses import dataclass

from benchmarks.measuring.figures import Reading, all_pass, every_line, kills, largest, together

PYTEST = ("-m", "pytest", "-q")
TORTURE = ("-m", "tests.crash.torture", "--instants")


@dataclass(frozen=True)
class Measure:
    """One command, and what is read from it."""

    name: str
    says: str
    """What it shows, in words."""
    words: tuple[str, ...]
    """The command line after `python`."""
    reading: Reading = all_pass
    target: str = "all pass"
    """In words, for a row that was not measured."""
    needs: str = ""
    """What an ordinary run of all of these lacks: `a GPU`, or hours."""


@dataclass(frozen=True)
class Promise:
    """What is promised, and what tries it."""

    title: str
    says: str
    measures: tuple[Measure, ...]


def by_tests(name: str, says: str, *paths: str, needs: str = "") -> Measure:
    """A measure that is tests passing."""
    slow = ("-m", "slow") if needs else ()
    return Measure(name, says, (*PYTEST, *slow, *paths), needs=needs)


MATHEMATICS = Promise(
    "1. The mathematics of the original",
    "With the same weights, data and settings, losses, gradient norm, learning rate and instances follow the original "
    "OLMo trainer step by step, and logits are those of `transformers`' own classes.",
    (
        Measure(
            "logits",
            "Logits of every architecture of the original: against its own, and against stock `transformers`",
            ("docs/parity_logits.py",),
            together(
                largest(r"^\| \w+ \| `\w+` \| ([^ ]+) \|", 1e-5, what="from the original"),
                largest(r"^\| \w+ \| `\w+` \| [^ ]+ \| ([\d.e+-]+) \|", 0.0, what="from stock"),
            ),
            "1e-05 at most; 0",
        ),
        Measure(
            "trajectories",
            "Runs of the original's trainer, trained again: cross-entropy, and instances of every step",
            (
                "docs/parity_trajectories.py",
                "t01_steps",
                "t02_tokens",
                "t05_labelmask_filter",
                "t08_stop_after_linear",
            ),
            together(
                largest(r"^\| t\w+ \| [\d-]+ \| ([^ ]+) / ", 1e-5, what="cross-entropy off by"),
                every_line(r"\| equal \| equal \|", of=r"^\| t", what="runs with equal rates and instances"),
            ),
            "1e-05 at most; all",
        ),
        by_tests("recorded", "All recorded runs, tasks and perplexities, each within its tolerance", "tests/golden"),
        by_tests(
            "parts",
            "Order of the data, schedules, clipping and updates against recorded ones, one by one",
            "tests/data/test_order.py",
            "tests/data/test_epoch_order.py",
            "tests/data/test_collator.py",
            "tests/training/test_schedulers.py",
            "tests/training/test_clipping.py",
            "tests/training/test_optimizers.py",
        ),
        by_tests("stock-classes", "Logits, gradients and caches of stock `transformers`", "tests/parity"),
        Measure(
            "gpu-numerics",
            "Attention, logits and gradients on a GPU against float32",
            ("benchmarks/gpu_numerics.py",),
            every_line(r"  ok$", of=r"  (ok|TOO FAR)$", what="comparisons within their limits"),
            "all",
            needs="a GPU",
        ),
    ),
)
SPLIT = Promise(
    "2. The split never changes the result",
    "Micro-batches, accumulation, data workers and ranks (DDP or FSDP2) change memory and speed, and nothing else: "
    "the same loss and parameters to 1e-6 in float32 on a CPU.",
    (
        Measure(
            "invariance",
            "The change of the weights in one step, cut in twelve ways",
            ("benchmarks/invariance.py",),
            largest(r"^largest difference ([^,]+),", 1e-6, what="largest difference of a weight"),
            "1e-06 at most",
        ),
        by_tests(
            "split", "Loss, gradient norm and weights, over one step and over twelve", "tests/invariants/test_split.py"
        ),
        by_tests("ranks", "Clipping and optimizers on several ranks", "tests/invariants/test_ranks.py"),
    ),
)
KILL = Promise(
    "3. Kill it anywhere",
    "After `kill -9` at any instant the same command goes on, and losses and weights are, bitwise, those of a run "
    "never killed; on another number of ranks the same data in the same order, and losses to 1e-5.",
    (
        Measure("kills", "Random instants, one process", (*TORTURE, "20", "--mode", "one"), kills, "no mismatch"),
        Measure("kills-ddp", "The same, two ranks", (*TORTURE, "10", "--mode", "ddp"), kills, "no mismatch"),
        Measure("kills-fsdp2", "The same, sharded", (*TORTURE, "10", "--mode", "fsdp2"), kills, "no mismatch"),
        by_tests("kill-in-save", "Chosen instants inside a save", "tests/crash/test_kill_and_go_on.py"),
        by_tests(
            "restarts",
            "Stopped twice, on the same and on another number of ranks",
            "tests/invariants/test_restart.py",
            "tests/invariants/test_restart_on_ranks.py",
        ),
        Measure(
            "kills-long",
            "Forty instants in each of five modes",
            (*TORTURE, "40"),
            kills,
            "no mismatch",
            needs="an hour: `make torture`",
        ),
        by_tests(
            "nodes", "A node killed among several", "tests/crash/test_nodes.py", needs="minutes more: `make slow`"
        ),
    ),
)
WHOLE = Promise(
    "4. A checkpoint is whole or absent",
    "Nothing half-written is taken up, the newest whole checkpoint is; a damaged one is named and passed over; a full "
    "or read-only disk harms no older one.",
    (
        by_tests(
            "commit",
            "Commit, damage and space, one by one",
            "tests/training/test_commit.py",
            "tests/training/test_disk.py",
        ),
        by_tests(
            "faults",
            "Real runs with damaged checkpoints and full disks",
            "tests/crash/test_faults.py",
            "tests/crash/test_disk.py",
        ),
    ),
)
MODEL = Promise(
    "5. A checkpoint is a model",
    "Every unsharded checkpoint loads with `AutoModelForCausalLM` and `AutoTokenizer` in a process that has stock "
    "`transformers` only, or, for an architecture that it lacks, with `trust_remote_code=True` from the files "
    "beside it.",
    (
        by_tests("stock-tools", "Stock `transformers` and lm-eval on a trained run", "tests/test_stock_tools.py"),
        by_tests("saved-models", "Every architecture, where this package is absent", "tests/model/test_saving.py"),
    ),
)
ORDER = Promise(
    "6. The order of the data is a fact",
    "From the configuration alone anyone can list, and read as text, what step N of rank R reads; what was really "
    "read is on record and agrees.",
    (
        by_tests(
            "inspection", "Asked without training, and compared with the record", "tests/data/test_inspection.py"
        ),
        by_tests(
            "record",
            "Real runs, killed, and gone on with on another number of ranks",
            "tests/data/test_record_of_runs.py",
        ),
        by_tests("replay", "Recorded steps trained again", "tests/replay"),
    ),
)
KNOBS = Promise(
    "7. Every setting does something",
    "Unknown keys, keys that nothing reads and impossible combinations fail at load, all at once, each with key, "
    "value, what was expected and the remedy.",
    (
        by_tests(
            "fields",
            "Every field of every section is explained, and read where something is done",
            "tests/house/test_fields.py",
        ),
        by_tests(
            "refusals", "Files and command lines with mistakes in them", "tests/test_config_file.py", "tests/settings"
        ),
        by_tests(
            "shipped",
            "Every configuration that is shipped",
            "tests/house/test_shipped_yaml.py",
            "tests/recipes/test_shipped_configs.py",
        ),
    ),
)
INPUT = Promise(
    "8. Bad input costs nothing",
    "It is refused before the first step, in words that a person can act on, and nothing that existed is overwritten.",
    (
        by_tests("bad-input", "Real launches with bad settings and data", "tests/test_bad_input.py"),
        by_tests("second-start", "Directories in use, of other runs, of other things", "tests/test_second_start.py"),
        by_tests("bad-data", "Token files and documents", "tests/data/test_checks.py", "tests/data/test_hostile.py"),
    ),
)
PROMISES = (MATHEMATICS, SPLIT, KILL, WHOLE, MODEL, ORDER, KNOBS, INPUT)
