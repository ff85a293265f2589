"""One process trains in a directory; it needs not end in order to let go."""

import subprocess
import sys
from pathlib import Path

import pytest

from olmo_hf.errors import CheckpointError
from olmo_hf.training.run_lock import run_lock


def test_the_second_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    code = "import sys, time; from pathlib import Path; from olmo_hf.training.run_lock import run_lock\n"
    code += "with run_lock(Path(sys.argv[1])):\n print('held', flush=True)\n time.sleep(600)"
    first = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        refused = pytest.raises(CheckpointError, match=rf"process {first.pid} on .* is training here already")
        with refused, run_lock(tmp_path):
            pass
    finally:
        first.kill()
        first.wait()
    with run_lock(tmp_path):
        pass
