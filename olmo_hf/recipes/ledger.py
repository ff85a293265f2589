"""Book-keeping of a translation: every key of a foreign file gets exactly one verdict."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["kept", "translated", "without effect", "refused"]
STATUSES: tuple[Status, ...] = ("kept", "translated", "without effect", "refused")


@dataclass(frozen=True)
class Verdict:
    """What became of one key.

    Attributes:
        key: Dotted key of the original.
        value: What the file says, once `${...}` is replaced.
        status: `kept`: the same value under our name. `translated`: said differently. `without effect`: nothing here
            depends on it, or it is so anyway. `refused`: it asks for something that does not exist here.
        ours: Our key, or none.
        note: The reason, or what to do.
    """

    key: str
    value: Any
    status: Status
    ours: str = ""
    note: str = ""


@dataclass(frozen=True)
class Difference:
    """A place where the original did something else than its file says."""

    key: str
    written: str
    executed: str
    taken: str


@dataclass
class Ledger:
    """Values of the original in, our settings out.

    Attributes:
        given: Dotted key to value, as the file and the command line say.
        defaults: Dotted key to the original's default.
        executed: Whether to translate what the original did, where that is not what its file says.
        settings: Our settings by dotted key.
        verdicts: One per key of `given`.
        filled: Our keys that stand for defaults of the original which the file leaves out.
        differences: Where writing and execution part.
    """

    given: Mapping[str, Any]
    defaults: Mapping[str, Any]
    executed: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    filled: dict[str, str] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)

    def value(self, key: str) -> Any:
        """What the original would use: the file's value, or the default."""
        return self.given[key] if key in self.given else self.defaults[key]

    def below(self, prefix: str) -> list[str]:
        """Keys of the file that start with `prefix` and have no verdict yet."""
        return [key for key in self.given if key.startswith(prefix) and key not in self.verdicts]

    def keep(self, key: str, ours: str) -> Any:
        """The value goes over as it is."""
        return self._set(key, ours, self.value(key), "kept", "")

    def translate(self, key: str, ours: str, value: Any, note: str = "") -> Any:
        """The value goes over in another form."""
        return self._set(key, ours, value, "translated", note)

    def put(self, ours: str, value: Any, because: str) -> None:
        """A setting of ours that no single key of the original asks for."""
        self.settings[ours] = value
        self.filled[ours] = because

    def no_effect(self, key: str, note: str) -> None:
        """Nothing here depends on the key."""
        self.judge(key, "without effect", "", note)

    def refuse(self, key: str, note: str) -> None:
        """The key asks for what does not exist here."""
        self.judge(key, "refused", "", note)

    def differ(self, key: str, *, written: str, executed: str, taken: str | None = None) -> None:
        """Notes that the original did not do what its file says."""
        default = executed if self.executed else written
        self.differences.append(Difference(key, written, executed, default if taken is None else taken))

    def counts(self) -> dict[str, int]:
        """Number of keys per verdict."""
        return {status: sum(v.status == status for v in self.verdicts.values()) for status in STATUSES}

    def refused(self) -> list[Verdict]:
        """The verdicts that say no."""
        return [verdict for verdict in self.verdicts.values() if verdict.status == "refused"]

    def as_json(self) -> dict[str, Any]:
        """Everything, for a file that programs read."""
        return {
            "as": "executed" if self.executed else "written",
            "counts": self.counts(),
            "keys": [asdict(verdict) for verdict in self.verdicts.values()],
            "filled": self.filled,
            "differences": [asdict(difference) for difference in self.differences],
        }

    def _set(self, key: str, ours: str, value: Any, status: Status, note: str) -> Any:
        self.settings[ours] = value
        if key in self.given:
            self.judge(key, status, ours, note)
        else:
            self.filled[ours] = note or f"the original's default of {key}"
        return value

    def judge(self, key: str, status: Status, ours: str, note: str) -> None:
        """Enters a verdict for a key of the file; a key that the file does not have needs none."""
        if key in self.given:
            assert key not in self.verdicts, f"{key} was judged before"
            self.verdicts[key] = Verdict(key, self.given[key], status, ours, note)
