"""Whether the data of the shipped tasks are on this machine."""

import pytest

from olmo_hf.evaluation.tasks.sources import INSTALL, data_roots

needs_data = pytest.mark.skipif(len(data_roots()) < 2, reason=f"the task data are not installed: {INSTALL}")
