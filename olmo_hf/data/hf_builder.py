"""Token files as a `datasets` data set: `datasets.load_dataset("olmo_memmap", data_files=..., sequence_length=...)`.

Shapes: `S` tokens of an instance, `R` instances of a table.
"""

import inspect
import os
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
from olmo_hf.data.remote import describe_remote, is_remote
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
        label_mask_files: Label masks of some splits, one byte per token, a file for each token file of the split.
        instances_per_shard: Longest shard, in instances: what one process of `num_proc`, one worker of a loader or
            one node takes. None: a file each.
    """

    sequence_length: int = 2048
    token_dtype: str | None = None
    label_mask_files: dict[str, list[str]] | None = None
    instances_per_shard: int | None = None

    def create_config_id(self, config_kwargs: dict[str, Any], custom_features: Any = None) -> str:
        """Identical to `BuilderConfig` except that label masks count, and for local files when they last changed.

        The name of the cache comes from it. `datasets` itself looks at size and modification time of the token files
        only, and both survive a copy that preserves times.
        """
        masks = [path for paths in (self.label_mask_files or {}).values() for path in paths]
        tokens = [str(path) for paths in (self.data_files or {}).values() for path in paths]
        marks = [_mark(path) for path in (*tokens, *masks)]
        config_id: str = super().create_config_id({**config_kwargs, "marks": marks}, custom_features)
        return config_id


def _mark(path: str) -> tuple[str, ...]:
    """What differs when the content of a file does."""
    if is_remote(path):
        return (path, *map(str, describe_remote(path)))
    try:
        status = os.stat(path)
    except OSError:
        return (path,)
    # The time of the last change of a file cannot be set by anyone.
    return (path, str(status.st_size), str(status.st_ctime_ns), str(status.st_ino))


class OlmoMemmap(datasets.ArrowBasedBuilder):
    """Instances of `sequence_length` tokens cut from token files, in file order, as `MemMapDataset` cuts them.

    A column `input_ids`: a list of `sequence_length` numbers of the type they have on disk; with label masks also
    `label_mask`: as many booleans, True where a token is trained on. A file that changed is another data set to the
    cache of `datasets`, so it is never served stale.
    """

    BUILDER_CONFIG_CLASS = OlmoMemmapConfig

    def _info(self) -> datasets.DatasetInfo:
        features = None
        if self.config.token_dtype is not None:
            value = datasets.Value(self.config.token_dtype)
            length = self.config.sequence_length
            features = datasets.Features({"input_ids": datasets.List(value, length=length)})
            if self.config.label_mask_files:
                features["label_mask"] = datasets.List(datasets.Value("bool"), length=length)
        return datasets.DatasetInfo(description="Token files cut into instances of one length", features=features)

    def _split_generators(self, dl_manager: Any) -> list[datasets.SplitGenerator]:
        if not self.config.data_files:
            raise DataError('data_files: is not given; write data_files={"train": ["data/train/*.npy"]}')
        downloaded = {
            split: list(map(str, paths)) for split, paths in dl_manager.download(self.config.data_files).items()
        }
        for name in ("sequence_length", "instances_per_shard"):
            value = getattr(self.config, name)
            if value is not None and value < 1:
                raise DataError(f"{name}: found {value}, expected 1 or more")
        masks = self._label_masks(downloaded)
        splits = []
        for split, paths in downloaded.items():
            shards: dict[str, list[Any]] = {"files": [], "masks": [], "first_instances": [], "last_instances": []}
            for path, mask_path in zip(paths, masks[split], strict=True):
                file = open_token_file(path, token_dtype(self._dtype_name(path)))
                mask = None if mask_path is None else open_label_mask(mask_path, file)
                num_instances = file.num_tokens // self.config.sequence_length
                step = self.config.instances_per_shard or max(num_instances, 1)
                for first in range(0, num_instances, step):
                    shards["files"].append(file)
                    shards["masks"].append(mask)
                    shards["first_instances"].append(first)
                    shards["last_instances"].append(min(first + step, num_instances))
            if not shards["files"]:
                raise DataError(
                    f"data_files: the files of {split!r} hold no instance of {self.config.sequence_length:,} tokens; "
                    "lower sequence_length or name others"
                )
            splits.append(datasets.SplitGenerator(name=split, gen_kwargs=shards))
        return splits

    def _label_masks(self, downloaded: dict[str, list[str]]) -> dict[str, list[str | None]]:
        """The label mask of every token file, by split."""
        given = self.config.label_mask_files or {}
        for split, paths in downloaded.items():
            found = len(given.get(split, ()))
            if given and found != len(paths):
                raise DataError(
                    f"label_mask_files: {found} files for the {len(paths)} token files of {split!r}; "
                    "expected one for each, in order, in every split"
                )
        unknown = sorted(set(given) - set(downloaded))
        if unknown:
            raise DataError(f"label_mask_files: has {unknown[0]!r}, which is no split of data_files; remove it")
        return {split: list(given.get(split, [None] * len(paths))) for split, paths in downloaded.items()}

    def _dtype_name(self, path: str) -> str:
        if self.config.token_dtype is not None:
            return str(self.config.token_dtype)
        manifest = manifest_beside(path)
        if manifest is None:
            raise DataError(f"token_dtype: is not given and no manifest.json lies beside {path}; say token_dtype=...")
        return manifest.token_dtype

    def _generate_shards(
        self,
        files: list[TokenFile],
        masks: list[TokenFile | None],
        first_instances: list[int],
        last_instances: list[int],
    ) -> Iterator[dict[str, Any]]:
        """Names of the shards, as `datasets` asks for them."""
        for file, first, last in zip(files, first_instances, last_instances, strict=True):
            yield {"path": file.path, "instances": [first, last]}

    def _generate_tables(
        self,
        files: list[TokenFile],
        masks: list[TokenFile | None],
        first_instances: list[int],
        last_instances: list[int],
    ) -> Iterator[tuple[Key, pa.Table]]:
        reader = TokenReader()
        length = self.config.sequence_length
        for shard, (file, mask, first, last) in enumerate(
            zip(files, masks, first_instances, last_instances, strict=True)
        ):
            for number, begin in enumerate(range(first, last, INSTANCES_PER_TABLE)):
                count = min(INSTANCES_PER_TABLE, last - begin)
                columns = {"input_ids": reader.read(file, begin * length, count * length)}  # (R * S,)
                if mask is not None:
                    columns["label_mask"] = reader.read(mask, begin * length, count * length)  # (R * S,)
                yield Key(shard, number), instances_table(columns, length)


def open_label_mask(path: str, file: TokenFile) -> TokenFile:
    """The label mask of a token file.

    Raises:
        DataError: It cannot be opened, or has not one byte per token.
    """
    mask = open_token_file(path, np.dtype(np.bool_))
    if mask.num_tokens != file.num_tokens:
        raise DataError(
            f"{path}: {mask.num_tokens:,} label flags for the {file.num_tokens:,} tokens of {file.path}; expected one "
            "byte per token"
        )
    return mask


def instances_table(columns: dict[str, np.ndarray], sequence_length: int) -> pa.Table:
    """Columns (R * S,) as a table of R instances; tokens are not copied."""
    return pa.table(
        {
            name: pa.FixedSizeListArray.from_arrays(pa.array(values), sequence_length)
            for name, values in columns.items()
        }
    )


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
