import os
import signal
import time

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
