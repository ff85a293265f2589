"""Remote token files, over a loopback server that behaves and misbehaves."""

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import DataLoader

from olmo_hf.data import remote, token_files
from olmo_hf.data.args import DataArgs
from olmo_hf.data.checks import check_data, resolve_files
from olmo_hf.data.manifest import FORMAT, VERSION, ManifestFile
from olmo_hf.data.manifest_lookup import _remote_manifest, manifest_beside, tokenizer_beside
from olmo_hf.data.memmap import MemMapDataset
from olmo_hf.data.path_patterns import expand_paths
from olmo_hf.data.remote import describe_remote, fetch, read_remote
from olmo_hf.data.token_checks import TokenLimits
from olmo_hf.errors import DataError
from tests.data.web_server import CONTENT, Server


def dataset(*urls: str, **options) -> MemMapDataset:
    return MemMapDataset(urls, sequence_length=10, token_dtype="uint16", **options)


def test_instances_are_read_in_exact_pieces(server: Server) -> None:
    server.files["/mask.bool"] = bytes([1, 0] * 500)
    data = dataset(server.url("/a.npy"), label_mask_paths=[server.url("/mask.bool")])
    server.reads.clear()
    assert data[7]["input_ids"].tolist() == CONTENT[70:80].tolist()
    assert data[7]["label_mask"].tolist() == [True, False] * 5
    assert server.reads[0] == ("/a.npy", "bytes=140-159")
    assert len(data) == 100
    assert data.locate(7).path == server.url("/a.npy")


@pytest.mark.parametrize("fault", ["drop", "truncate", "short", "error", "shift"])
def test_what_may_pass_is_tried_again(server: Server, fault: str) -> None:
    data = dataset(server.url("/a.npy"))
    server.faults = [fault] * (remote.MAX_ATTEMPTS - 1)
    assert data[98]["input_ids"].tolist() == CONTENT[980:990].tolist()
    server.faults = [fault] * 100
    server.reads.clear()
    with pytest.raises(DataError, match=r"a\.npy: bytes 1,960 to 1,980 cannot be read in 6 attempts"):
        data[98]
    # aiohttp itself repeats a request once when a kept connection was closed.
    assert remote.MAX_ATTEMPTS <= len(server.reads) <= 2 * remote.MAX_ATTEMPTS


def test_a_server_that_is_silent_is_asked_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "READ_TIMEOUT_SECONDS", 0.2)
    server.faults = ["delay"] * 2
    assert read_remote(server.url("/a.npy"), 0, 4) == CONTENT[:2].tobytes()
    server.faults = ["delay"] * 100
    with pytest.raises(DataError, match=r"cannot be read in 6 attempts \(.*Timeout"):
        read_remote(server.url("/a.npy"), 0, 4)


def test_what_will_not_pass_is_not(server: Server) -> None:
    data = dataset(server.url("/a.npy"))
    server.faults = ["deny"] * 5
    server.reads.clear()
    with pytest.raises(DataError, match=r"bytes 0 to 20 cannot be read \(403"):
        data[0]
    assert len(server.reads) == 1
    with pytest.raises(DataError, match=r"gone\.npy: size cannot be read \("):
        dataset(server.url("/gone.npy"))


def test_pauses_grow(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(remote, "FIRST_PAUSE_SECONDS", 0.5)
    monkeypatch.setattr(remote.time, "sleep", pauses.append)
    server.faults = ["error"] * 3
    assert read_remote(server.url("/a.npy"), 0, 4) == CONTENT[:2].tobytes()
    assert pauses == [0.5, 1.0, 2.0]


def test_a_changed_file_is_noticed(server: Server) -> None:
    data = dataset(server.url("/a.npy"))
    data[0]
    # In the middle of a run, by the server itself.
    server.files["/a.npy"] = (CONTENT + 1).tobytes()
    with pytest.raises(DataError, match=r"a\.npy: was changed while in use"):
        data[0]
    # By a process that begins to read later.
    fresh = dataset(server.url("/a.npy"))
    server.files["/a.npy"] = CONTENT[:-1].tobytes()
    with pytest.raises(DataError, match=r"a\.npy: was changed since the start"):
        fresh[0]


def test_a_server_that_overlooks_the_condition(server: Server) -> None:
    server.conditions = False
    data = dataset(server.url("/a.npy"))
    assert data[0]["input_ids"].tolist() == CONTENT[:10].tolist()
    server.files["/a.npy"] = (CONTENT + 1).tobytes()
    with pytest.raises(DataError, match=r"a\.npy: was changed while in use"):
        data[0]


def test_a_server_without_ranges_is_named(server: Server, tmp_path: Path) -> None:
    server.files["/a.npy"] = np.zeros(10_000, np.uint16).tobytes()
    server.ranges = False
    with pytest.raises(DataError, match=r"sends the whole file \(20,000 bytes\), not the 4,096 asked for"):
        dataset(server.url("/a.npy"))


def test_workers(server: Server) -> None:
    data = dataset(server.url("/a.npy"))
    data[0]
    loader = DataLoader(data, batch_size=25, num_workers=2)
    assert np.concatenate([b["input_ids"].flatten() for b in loader]).tolist() == CONTENT.tolist()


def test_an_error_in_a_worker_names_the_file(server: Server) -> None:
    data = dataset(server.url("/a.npy"))
    server.faults = ["deny"] * 100
    with pytest.raises(DataError, match=r"a\.npy: bytes 0 to 20 cannot be read"):
        list(DataLoader(data, batch_size=25, num_workers=1))


def test_checks_and_headers(server: Server, tmp_path: Path) -> None:
    np.save(tmp_path / "h.npy", CONTENT)
    server.files["/h.npy"] = (tmp_path / "h.npy").read_bytes()
    args = DataArgs(paths=(server.url("/a.npy"), server.url("/h.npy")), token_dtype="uint16", sequence_length=10)
    assert check_data(args, limits=TokenLimits(vocab_size=500)) == []
    problems = check_data(args, limits=TokenLimits(vocab_size=400))
    assert len(problems) == 2
    assert "token 58 is id 406" in problems[0]
    assert dataset(server.url("/h.npy"))[3]["input_ids"].tolist() == CONTENT[30:40].tolist()


def test_the_cache(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FETCH_BYTES", 700)
    url = server.url("/a.npy")
    server.faults = ["drop", "", "truncate"]
    first = fetch(url, str(tmp_path))
    assert Path(first).read_bytes() == CONTENT.tobytes()
    server.reads.clear()
    assert fetch(url, str(tmp_path)) == first
    assert server.reads == []
    server.files["/a.npy"] = (CONTENT + 1).tobytes()
    second = fetch(url, str(tmp_path))
    assert second != first
    assert Path(second).read_bytes() == (CONTENT + 1).tobytes()
    # A copy that was cut off is continued.
    Path(second).rename(Path(second).with_name(f".{Path(second).name}.part"))
    with open(Path(second).with_name(f".{Path(second).name}.part"), "r+b") as stream:
        stream.truncate(1_900)
    server.reads.clear()
    assert Path(fetch(url, str(tmp_path))).read_bytes() == (CONTENT + 1).tobytes()
    assert [asked for _, asked in server.reads] == ["bytes=1900-1999"]
    args = DataArgs(paths=(url,), token_dtype="uint16", sequence_length=10, cache_dir=str(tmp_path))
    assert resolve_files(args).paths == [second]


def test_a_query_is_no_glob(server: Server) -> None:
    assert expand_paths(["https://example.org/a.npy?token=x*"]) == ["https://example.org/a.npy?token=x*"]
    assert describe_remote(server.url("/a.npy"))[0] == 2_000


def test_an_unknown_protocol_is_named() -> None:
    with pytest.raises(DataError, match=r"nowhere://x: cannot be read here"):
        describe_remote("nowhere://x")


def test_globs_over_a_protocol() -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    for name in ("b", "a"):
        memory.pipe(f"/tokens/{name}.npy", CONTENT.tobytes())
    paths = expand_paths(["memory://tokens/*.npy"])
    assert paths == ["memory:///tokens/a.npy", "memory:///tokens/b.npy"]
    assert dataset(*paths)[100]["input_ids"].tolist() == CONTENT[:10].tolist()
    with pytest.raises(DataError, match="matches no file"):
        expand_paths(["memory://tokens/*.bin"])


def test_datasets_streams_remote_files(server: Server) -> None:
    import datasets

    from olmo_hf.data.hf_builder import register_dataset_builder

    register_dataset_builder()
    stream = datasets.load_dataset(
        "olmo_memmap",
        data_files={"train": [server.url("/a.npy")]},
        sequence_length=10,
        token_dtype="uint16",
        streaming=True,
    )["train"]
    assert np.concatenate([row["input_ids"] for row in stream]).tolist() == CONTENT.tolist()


def with_manifest(server: Server, **changes: object) -> DataArgs:
    """The file of the server in a prepared folder; the section says nothing about it."""
    content = CONTENT.tobytes()
    file = ManifestFile("00000.npy", 1_000, 3, 2_000, hashlib.sha256(content).hexdigest())
    manifest = {
        "token_dtype": "uint16",
        "vocab_size": 500,
        "eos_token_id": 0,
        "pad_token_id": 1,
        "tokenizer": "../tokenizer",
        "tokenizer_sha256": "",
        "num_documents": 3,
        "num_tokens": 1_000,
        "files": [asdict(file) | changes],
    }
    text = json.dumps({"format": FORMAT, "version": VERSION, **manifest})
    _remote_manifest.cache_clear()
    server.files = {"/data/train/00000.npy": content, "/data/train/manifest.json": text.encode()}
    return DataArgs(paths=(server.url("/data/train/00000.npy"),), sequence_length=10, check="full")


def test_the_manifest_beside_a_remote_file_counts(server: Server, tmp_path: Path) -> None:
    limits = TokenLimits(vocab_size=500, eos_token_id=0)
    section = with_manifest(server)
    assert resolve_files(section).token_dtype == "uint16"
    assert check_data(section, limits=limits) == []
    assert check_data(replace(section, cache_dir=str(tmp_path)), limits=limits) == []
    assert tokenizer_beside(section.paths[0]) == server.url("/data/tokenizer")
    wrong_eos = check_data(section, limits=TokenLimits(vocab_size=500, eos_token_id=3))
    assert "its documents end with id 0 (manifest), the model's end of text is 3" in wrong_eos[0]
    for changes, said in (
        ({"size_bytes": 1_998}, "the manifest says 1,998"),
        ({"sha256": "0"}, "its checksum is not"),
    ):
        section = with_manifest(server, **changes)
        for one in (section, replace(section, cache_dir=str(tmp_path))):
            (problem,) = check_data(one, limits=limits)
            assert problem.startswith(section.paths[0])
            assert said in problem


def test_a_remote_folder_without_a_manifest(server: Server) -> None:
    _remote_manifest.cache_clear()
    url = server.url("/a.npy")
    assert manifest_beside(url) is None
    with pytest.raises(DataError, match=r"data\.token_dtype: is not set and no manifest"):
        resolve_files(DataArgs(paths=(url,), sequence_length=10))
    # What a server says instead of "not found" is no manifest; half of one is not passed over.
    server.files["/b/manifest.json"] = b"<html>Nothing here</html>"
    assert manifest_beside(server.url("/b/x.npy")) is None
    server.files["/c/manifest.json"] = json.dumps({"format": FORMAT, "version": VERSION}).encode()[:-5]
    with pytest.raises(DataError, match="cannot be read"):
        manifest_beside(server.url("/c/x.npy"))
    assert manifest_beside(server.url("/c/x.npy?signature=abc")) is None


def test_a_folder_is_asked_for_its_manifest_once(server: Server) -> None:
    section = with_manifest(server)
    server.files |= {f"/data/train/{i:05d}.npy": CONTENT.tobytes() for i in range(1, 30)}
    section = replace(section, paths=tuple(server.url(f"/data/train/{i:05d}.npy") for i in range(30)), check="quick")
    assert check_data(section, limits=TokenLimits(vocab_size=500)) == []
    asked = [path for path, _ in server.reads if path.endswith("manifest.json")]
    assert len(asked) == 1


def test_where_the_server_compares_nothing_a_change_is_noticed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe("/changing/a.npy", CONTENT.tobytes())
    data = dataset("memory://changing/a.npy")
    assert data[0]["input_ids"].tolist() == CONTENT[:10].tolist()
    memory.pipe("/changing/a.npy", CONTENT[:-1].tobytes())
    monkeypatch.setattr(token_files, "CONFIRM_SECONDS", 0.0)
    with pytest.raises(DataError, match=r"changing/a\.npy: was changed since the start"):
        data[0]
