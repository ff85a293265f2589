"""Importing this puts the process's clock back by twenty years, and by a day more at every hundredth look at it."""

import datetime
import time

_time = time.time
_looks = 0


def behind() -> float:
    """Instead of `time.time`."""
    global _looks
    _looks += 1
    return _time() - 20 * 365 * 86_400 - 86_400 * (_looks // 100)


class Behind(datetime.datetime):
    """Instead of `datetime.datetime`."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> "Behind":
        """The time by the clock that was set back."""
        return cls.fromtimestamp(behind(), tz)


time.time = behind
datetime.datetime = Behind  # type: ignore[misc]
