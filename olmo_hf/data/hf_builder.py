"""Token files as a `datasets` data set: `datasets.load_dataset("olmo_memmap", data_files=..., sequence_length=...)`.

Shapes: `S` tokens of an instance, `R` instances of a table.
"""

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from datasets import packaged_modules
from datasets.builder import Key

from olmo_hf.data.manifest_lookup import manifest_beside
from olmo_hf.data.token_files import TokenFile, TokenReader, open_token_file, token_dtype
from olmo_hf.errors import DataError

BUILDER_NAME = "olmo_memmap"

INSTANCES_PER_TABLE = 1_024
"""Instances handed over at once; at 4,096 tokens of two bytes, 8 MiB."""


@dataclass
class OlmoMemmapConfig(datasets.BuilderConfig):
    """Options of `load_dataset("olmo_memmap", ...)`.

    Args:
        sequence_length: Tokens per instance.
        token_dtype: Type of a token on disk. None: what the manifest beside the files says.
        instances_per_shard: Longest shard, in instances: what one process of `num_proc`, one worker of a loader or
            one node takes. None: a file each.
    """

    sequence_length: int = 2048
    token_dtype: str | None = None
    instances_per_shard: int | None = None


class OlmoMemmap(datasets.ArrowBasedBuilder):
    """Instances of `sequence_length` tokens cut from token files, in file order, as `MemMapDataset` cuts them.

    One column, `input_ids`: a list of `sequence_length` numbers of the type they have on disk. A file that changed
    (size or time) is another data set to the cache of `datasets`, so it is never served stale.
    """

    BUILDER_CONFIG_CLASS = OlmoMemmapConfig

    def _info(self) -> datasets.DatasetInfo:
        features = None
        if self.config.token_dtype is not None:
            value = datasets.Value(self.config.token_dtype)
            features = datasets.Features({"input_ids": datasets.List(value, length=self.config.sequence_length)})
        return datasets.DatasetInfo(description="Token files cut into instances of one length", features=features)

    def _split_generators(self, dl_manager: Any) -> list[datasets.SplitGenerator]:
        if not self.config.data_files:
            raise DataError('data_files: is not given; write data_files={"train": ["data/train/*.npy"]}')
        splits = []
        for split, downloaded in dl_manager.download(self.config.data_files).items():
            shards: dict[str, list[Any]] = {"files": [], "first_instances": [], "last_instances": []}
            for path in map(str, downloaded):
                file = open_token_file(path, token_dtype(self._dtype_name(path)))
                num_instances = file.num_tokens // self.config.sequence_length
                step = self.config.instances_per_shard or max(num_instances, 1)
                for first in range(0, num_instances, step):
                    shards["files"].append(file)
                    shards["first_instances"].append(first)
                    shards["last_instances"].append(min(first + step, num_instances))
            splits.append(datasets.SplitGenerator(name=split, gen_kwargs=shards))
        return splits

    def _dtype_name(self, path: str) -> str:
        if self.config.token_dtype is not None:
            return str(self.config.token_dtype)
        manifest = manifest_beside(path)
        if manifest is None:
            raise DataError(f"token_dtype: is not given and no manifest.json lies beside {path}; say token_dtype=...")
        return manifest.token_dtype

    def _generate_shards(
        self, files: list[TokenFile], first_instances: list[int], last_instances: list[int]
    ) -> Iterator[dict[str, Any]]:
        """Names of the shards, as `datasets` asks for them."""
        for file, first, last in zip(files, first_instances, last_instances, strict=True):
            yield {"path": file.path, "instances": [first, last]}

    def _generate_tables(
        self, files: list[TokenFile], first_instances: list[int], last_instances: list[int]
    ) -> Iterator[tuple[Key, pa.Table]]:
        reader = TokenReader()
        length = self.config.sequence_length
        for shard, (file, first, last) in enumerate(zip(files, first_instances, last_instances, strict=True)):
            for number, begin in enumerate(range(first, last, INSTANCES_PER_TABLE)):
                count = min(INSTANCES_PER_TABLE, last - begin)
                tokens = reader.read(file, begin * length, count * length)  # (R * S,)
                yield Key(shard, number), instances_table(tokens, length)


def instances_table(tokens: np.ndarray, sequence_length: int) -> pa.Table:
    """Tokens (R * S,) as a table of R instances, without a copy."""
    flat = pa.array(tokens)
    return pa.table({"input_ids": pa.FixedSizeListArray.from_arrays(flat, sequence_length)})


def register_dataset_builder() -> None:
    """Makes `datasets` know the builder in this process. Done by `import olmo_hf`.

    Processes started by `datasets` or by a loader need no registration: they get the builder by its module.
    """
    module = sys.modules[__name__]
    # A packaged module is found by name without a hub; there is no public way to add one.
    source_hash = packaged_modules._hash_python_lines(inspect.getsource(module).splitlines())
    packaged_modules._PACKAGED_DATASETS_MODULES[BUILDER_NAME] = (__name__, source_hash)
    packaged_modules._MODULE_TO_EXTENSIONS[BUILDER_NAME] = [".npy", ".bin"]
    packaged_modules._MODULE_TO_METADATA_FILE_NAMES[BUILDER_NAME] = []
    packaged_modules._MODULE_TO_METADATA_EXTENSIONS[BUILDER_NAME] = []
