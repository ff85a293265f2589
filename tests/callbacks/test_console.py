import io

import pytest

from olmo_hf.callbacks.args import ConsoleArgs
from olmo_hf.callbacks.console import Console, progress_line
from olmo_hf.wording import duration, short_number

LOGS = {
    "train/CrossEntropyLoss": 3.21456,
    "optim/total_grad_norm": 0.123456,
    "optim/learning_rate_group0": 3.9e-4,
    "throughput/tokens_per_second": 1_234_567.0,
    "throughput/device/mfu": 0.412,
    "throughput/seconds_left": 3 * 3600 + 62.0,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(console: Console, clock, arguments, state, control, steps: int, seconds: float) -> str:
    console.on_train_begin(arguments, state, control)
    for _ in range(steps):
        clock.wait(seconds)
        state.global_step += 1
        state.num_input_tokens_seen += 100
        console.on_log(arguments, state, control, logs={**LOGS, "train/CrossEntropyLoss": float(state.global_step)})
    console.on_train_end(arguments, state, control)
    return console._stream.getvalue()


def test_one_line_says_it_all() -> None:
    assert progress_line(1200, 10_000, LOGS) == (
        "step 1,200/10,000  loss 3.2146  grad 0.1235  lr 0.00039  1.23M tok/s  MFU 41.2%  3h01m left"
    )


def test_what_is_not_known_is_left_out_and_nan_is_shown() -> None:
    assert progress_line(1, 10, {"train/CrossEntropyLoss": float("nan")}) == "step 1/10  loss nan"


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.4, "4s"), (187, "3m07s"), (5 * 3600 + 720, "5h12m"), (6 * 86400 + 4 * 3600, "6d04h")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_short_number() -> None:
    assert [short_number(value) for value in (0.5, 999, 1234, 5.6e6, 7e9, 5e12, 999_990)] == [
        "0.5",
        "999",
        "1.23k",
        "5.6M",
        "7B",
        "5T",
        "1M",
    ]


def test_lines_not_too_often_but_always_the_first_and_the_last(clock, arguments, state, control) -> None:
    state.max_steps = 7
    console = Console(ConsoleArgs(style="lines", seconds_between_lines=2.0), stream=io.StringIO(), clock=clock)
    text = run(console, clock, arguments, state, control, steps=7, seconds=0.9)
    shown = [line.split()[1] for line in text.splitlines() if line.startswith("step ")]
    assert shown == ["1/7", "4/7", "7/7"]


def test_a_run_that_ends_early_still_shows_its_last_step(clock, arguments, state, control) -> None:
    console = Console(ConsoleArgs(style="lines", seconds_between_lines=1e9), stream=io.StringIO(), clock=clock)
    text = run(console, clock, arguments, state, control, steps=4, seconds=1.0)
    assert [line.split()[1] for line in text.splitlines() if line.startswith("step ")] == ["1/10", "4/10"]


def test_a_terminal_gets_one_line_that_is_rewritten(clock, arguments, state, control, monkeypatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("COLUMNS", "200")  # whatever these tests run in
    text = run(
        Console(ConsoleArgs(), stream=Terminal(), clock=clock), clock, arguments, state, control, steps=5, seconds=1
    )
    progress = text.split("Result")[0]
    assert progress.count("\n") == 1, "the line is ended once, at the end"
    assert progress.count("\r\x1b[K") == 6
    assert "[==========          ] step 5/10" in progress


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (
            200,
            "[==                  ] step 1/10  loss 3.2146  grad 0.1235  lr 0.00039  1.23M tok/s  MFU 41.2%  "
            "3h01m left",
        ),
        (80, "step 1/10  loss 3.2146  grad 0.1235  lr 0.00039  1.23M tok/s  3h01m left"),
        (40, "step 1/10  loss 3.2146  3h01m left"),
        (20, "step 1/10  loss 3.2"),
    ],
)
def test_a_narrow_terminal_gets_what_fits(columns, shown, clock, arguments, state, control, monkeypatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("COLUMNS", str(columns))
    console = Console(ConsoleArgs(), stream=Terminal(), clock=clock)
    state.global_step = 1
    console.on_log(arguments, state, control, logs=LOGS)
    assert console._stream.getvalue().removeprefix("\r\x1b[K") == shown


def test_ci_and_files_get_no_control_characters(clock, arguments, state, control, monkeypatch) -> None:
    monkeypatch.setenv("CI", "true")
    text = run(
        Console(ConsoleArgs(), stream=Terminal(), clock=clock), clock, arguments, state, control, steps=3, seconds=9
    )
    assert "\x1b" not in text
    assert "\r" not in text


def test_result_table(clock, arguments, state, control) -> None:
    console = Console(ConsoleArgs(style="lines"), stream=io.StringIO(), clock=clock)
    console.on_log(arguments, state, control, logs={"eval/c4/Perplexity": 12.5})
    text = run(console, clock, arguments, state, control, steps=4, seconds=2)
    assert text.index("step 1/10") < text.index("Result")
    assert "4 (4 in this launch)" in text
    assert "8s" in text
    assert "eval/c4/Perplexity" in text
    assert "12.5000" in text


def test_result_table_in_no_columns(clock, arguments, state, control, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "3")
    console = Console(ConsoleArgs(style="lines"), stream=io.StringIO(), clock=clock)
    assert "4 (4 in this launch)" in run(console, clock, arguments, state, control, steps=4, seconds=2)


def test_checkpoints_are_mentioned_not_too_often(clock, arguments, state, control) -> None:
    console = Console(ConsoleArgs(style="lines", seconds_between_lines=2.0), stream=io.StringIO(), clock=clock)
    for _ in range(5):
        clock.wait(0.9)
        state.global_step += 1
        console.on_save(arguments, state, control)
    assert console._stream.getvalue() == "checkpoint at step 1\ncheckpoint at step 4\n"


def test_other_ranks_are_silent(clock, arguments, state, control) -> None:
    state.is_world_process_zero = False
    console = Console(ConsoleArgs(style="lines"), stream=io.StringIO(), clock=clock)
    assert run(console, clock, arguments, state, control, steps=2, seconds=9) == ""
