"""`train_hf.py` with float16 on a CPU, which Accelerate does not offer and torch does. Run by `test_float16_on_ranks`.

The scaler and the autocast are torch's own, put where Accelerate puts them on a GPU.
"""

import os
import sys
from typing import Any

import accelerate
import torch

original = accelerate.Accelerator.__init__


def init(self: accelerate.Accelerator, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    if self.mixed_precision == "fp16":
        self.native_amp = True
        self.scaler = torch.amp.GradScaler("cpu", init_scale=float(os.environ["SCALE"]), backoff_factor=2.0**-8)


if __name__ == "__main__":
    accelerate.Accelerator.__init__ = init  # type: ignore[method-assign]
    import train_hf

    sys.exit(train_hf.run_and_report(train_hf.main, sys.argv[1:]))
