import math
from pathlib import Path

from olmo_hf.callbacks.json_lines import EVENTS_FILE, METRICS_FILE, read_json_lines
from olmo_hf.callbacks.metrics_file import MetricsFile


def test_one_line_per_log_with_step_tokens_and_time(tmp_path: Path, arguments, state, control, clock) -> None:
    callback = MetricsFile(tmp_path, clock=clock)
    callback.on_train_begin(arguments, state, control)
    for step in (1, 2):
        state.global_step, state.num_input_tokens_seen = step, step * 64
        clock.wait(0.5)
        callback.on_log(arguments, state, control, logs={"train/CrossEntropyLoss": math.nan if step == 2 else 3.25})
    callback.on_save(arguments, state, control)
    callback.on_log(arguments, state, control, logs={"train_runtime": 1.0, "train_loss": 0.5})
    callback.on_train_end(arguments, state, control)
    rows = list(read_json_lines(tmp_path / METRICS_FILE))
    assert rows[0] == {"step": 1, "tokens": 64, "time": 1000.5, "train/CrossEntropyLoss": 3.25}
    assert [row["step"] for row in rows] == [1, 2], "the closing summary is no step"
    assert math.isnan(rows[1]["train/CrossEntropyLoss"]), "a NaN is logged as what it is"
    events = list(read_json_lines(tmp_path / EVENTS_FILE))
    assert [(event["event"], event["step"]) for event in events] == [
        ("start", 0),
        ("checkpoint", 2),
        ("summary", 2),
        ("end", 2),
    ]


def test_other_ranks_write_nothing(tmp_path: Path, arguments, state, control) -> None:
    state.is_world_process_zero = False
    callback = MetricsFile(tmp_path)
    callback.on_train_begin(arguments, state, control)
    callback.on_log(arguments, state, control, logs={"train/CrossEntropyLoss": 1.0})
    callback.on_train_end(arguments, state, control)
    assert list(tmp_path.iterdir()) == []
