import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from olmo_hf.training.worker_signals import outlive_first_request


class ProcessIds(Dataset):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def test_a_worker_outlives_what_a_scheduler_sends_to_the_group() -> None:
    loader = DataLoader(ProcessIds(), batch_size=1, num_workers=1, worker_init_fn=outlive_first_request)
    batches = iter(loader)
    worker = int(next(batches))
    assert worker != os.getpid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
        os.kill(worker, number)
    time.sleep(0.2)
    rest = torch.cat(list(batches))
    assert len(rest) == 99, "torch's own handler would have ended the worker"
    assert set(rest.tolist()) == {worker}


PROGRAM = """
import os, time
from torch.utils.data import DataLoader
from olmo_hf.training.worker_signals import end_workers_at_exit, outlive_first_request

end_workers_at_exit()
loader = DataLoader(range(100), num_workers=2, persistent_workers=True, worker_init_fn=outlive_first_request)
kept = iter(loader)
kept.itself = kept  # no reference counting ends them
next(kept)
print(" ".join(str(worker.pid) for worker in kept._workers), flush=True)
raise SystemExit(2)
"""


def test_no_worker_holds_up_the_end_of_the_process() -> None:
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100)
    assert time.monotonic() - began < 40, "without it: a minute"
    assert (done.returncode, done.stderr) == (2, "")
    for worker in done.stdout.split():
        assert not Path(f"/proc/{worker}").exists()
