"""Acts when another package has been imported, without importing it.

`import olmo_hf` promises that the Auto classes and `datasets` know what this package adds. Importing them for that
would cost everyone seconds, also `olmo-hf --help` and the reading of a configuration, which need neither.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(package: str, action: Callable[[], bool]) -> None:
    """Calls `action` whenever an import of modules of a package has come to its end, until it returns True.

    It is called only when no module of that package or of this one is half imported, so `action` may import more of
    both. It is called at once too, when the package is there already.

    Args:
        package: name of a top-level package.
        action: returns whether it has done all it had to do; what it raises reaches whoever imports the package.
    """
    if package not in sys.modules or not action():
        sys.meta_path.insert(0, _Watcher(package, action))


class _Watcher(MetaPathFinder):
    """Stands before Python's own finders and lets them find, but hears of every import's end."""

    def __init__(self, package: str, action: Callable[[], bool]):
        self.packages = (package, __name__.partition(".")[0])
        self.action = action
        self.depth = 0
        self.is_looking = False
        self.is_acting = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec for modules of the two packages; None for every other module."""
        if self.is_looking or fullname.partition(".")[0] not in self.packages:
            return None
        self.is_looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.is_looking = False
        if spec is not None and spec.loader is not None:
            self._listen(spec.loader)
        return spec

    def _listen(self, loader: Any) -> None:
        """Replaces `exec_module` of this one loader until it is called; a module may be looked up and not imported."""

        inner = loader.exec_module  # the class's own, or that of another watcher

        def execute(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            self.depth += 1
            try:
                inner(module)
            finally:
                self.depth -= 1
            if self.depth == 0 and not self.is_acting and self in sys.meta_path and self.packages[0] in sys.modules:
                self._act()

        loader.exec_module = execute

    def _act(self) -> None:
        self.is_acting = True  # what the action imports calls it no second time
        try:
            if self.action():
                sys.meta_path.remove(self)
        finally:
            self.is_acting = False
