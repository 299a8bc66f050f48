"""What only an object store can get wrong, against a real S3 server. What holds for every store: test_storage.py."""

from __future__ import annotations

import gc
import socket
from collections.abc import Iterator

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

from memckpt.errors import StorageError
from memckpt.storage.catalog import read_catalog
from memckpt.storage.store import matches, verify_files
from memckpt.storage.urls import open_store
from tests.conftest import Bucket
from tests.support.storage.stored_parts import part_of, write

#: More than s3fs uploads at once.
LARGE_BYTES = 64 << 20


@pytest.fixture
def no_memory_of_servers() -> Iterator[None]:
    """fsspec keeps what it has opened, by URL: not for another server, and not longer than for one test."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    yield
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_large_file_is_uploaded_in_parts_and_read_back(bucket: Bucket) -> None:
    store = open_store(bucket.url)
    data = torch.randint(0, 256, (LARGE_BYTES + 7,), dtype=torch.uint8).numpy()
    with store.create("a/large") as stream:
        stream.write(data)
        stream.write(b"and more")
    stored = stream.stored("a/large")
    head = bucket.client.head_object(Bucket=bucket.name, Key="some/run/a/large")
    assert head["ETag"].strip('"').endswith("-2")  # in two parts
    assert head["ContentLength"] == stored.nbytes == LARGE_BYTES + 15
    assert matches(store, stored) is None
    with store.open("a/large") as file:
        file.seek(LARGE_BYTES)
        assert file.read() == data.tobytes()[LARGE_BYTES:] + b"and more"
        file.seek(5)
        assert file.read(9) == data.tobytes()[5:14]
    assert bucket.uploads() == []


@pytest.mark.promise("an upload that fails leaves the old object and no new one")
@pytest.mark.parametrize(
    "nbytes", [pytest.param(4, id="small"), pytest.param(LARGE_BYTES, id="in parts", marks=pytest.mark.slow)]
)
def test_an_upload_that_fails_half_way_leaves_nothing(bucket: Bucket, nbytes: int) -> None:
    store = open_store(bucket.url)

    def write_half() -> None:
        with store.create("a/b") as stream:
            stream.write(bytes(nbytes))
            raise KeyError("no more")

    with pytest.raises(KeyError):
        write_half()
    gc.collect()
    assert bucket.objects() == bucket.uploads() == []
    store.write("a/b", b"old")
    with pytest.raises(KeyError):
        write_half()
    gc.collect()
    assert bucket.objects() == ["a/b"]
    assert bucket.uploads() == []
    assert store.read("a/b") == b"old"


def test_a_bucket_that_goes_away_during_an_upload_is_an_error_that_names_the_file(bucket: Bucket) -> None:
    store = open_store(bucket.url)

    def write_half() -> None:
        with store.create("a/b") as stream:
            stream.write(b"some")
            bucket.client.delete_bucket(Bucket=bucket.name)

    with pytest.raises(StorageError, match=r"could not write a/b in s3://"):
        write_half()
    gc.collect()
    with pytest.raises(StorageError, match="could not list a in"):
        store.find("a")


def test_a_server_that_is_not_there_is_an_error_that_names_the_file(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, no_memory_of_servers: None
) -> None:
    """What botocore raises for it is no OSError."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        store = open_store(bucket.url)
        with pytest.raises(StorageError, match=r"could not read owner.json in s3://.*EndpointConnectionError"):
            read_catalog(store)
        with pytest.raises(StorageError, match=r"could not write a in s3://.*EndpointConnectionError"):
            store.write("a", b"x")
        with pytest.raises(StorageError, match=r"could not delete a in s3://.*EndpointConnectionError"):
            store.delete("a")


def test_torch_loads_a_base_by_itself(bucket: Bucket) -> None:
    store = open_store(bucket.url)
    part = write(store, part_of(3))
    (checkpoint,) = read_catalog(store).complete
    assert verify_files(store, checkpoint.part_files) == []
    state = {"model.weight": torch.zeros(2, 3)}
    dcp.load(state, storage_reader=FsspecReader(f"{bucket.url}/{part.base_directory}"), no_dist=True)
    assert torch.equal(state["model.weight"], torch.arange(6.0).view(2, 3) + 3)
