"""For all tests: what is drawn at random is the same at every run, so that a failure is there again tomorrow.

`HYPOTHESIS_PROFILE=search` draws anew, to look for cases nobody has seen.
"""

import os

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True)
settings.register_profile("search", derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
