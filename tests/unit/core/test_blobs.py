import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.blobs import Blobs, digest_of
from evener.errors import InfraError


@given(st.binary(max_size=2000))
def test_round_trip(data: bytes):
    blobs = Blobs("memory://evener-test")
    digest = blobs.put("snapshots", data)
    assert digest == digest_of(data)
    assert blobs.get("snapshots", digest) == data


def test_areas_are_apart(tmp_path):
    blobs = Blobs(tmp_path)
    digest = blobs.put("grader", b"tests")
    assert blobs.has("grader", digest)
    assert not blobs.has("agent", digest)
    with pytest.raises(InfraError, match=f"a blob is gone: {digest} in agent"):
        blobs.get("agent", digest)


def test_damage_is_seen(tmp_path):
    blobs = Blobs(tmp_path)
    digest = blobs.put("weights", b"right")
    next(p for p in tmp_path.rglob("*") if p.is_file()).write_bytes(b"wrong")
    with pytest.raises(InfraError, match="is damaged"):
        blobs.get("weights", digest)


def test_twice_is_once(tmp_path):
    blobs = Blobs(tmp_path)
    assert blobs.put("logs", b"x") == blobs.put("logs", b"x")
    assert len([p for p in tmp_path.rglob("*") if p.is_file()]) == 1


@pytest.mark.parametrize("digest", ["", "sha256:../../etc/passwd", "sha256:" + "0" * 63, "md5:" + "0" * 64])
def test_what_is_no_digest_is_refused(tmp_path, digest: str):
    with pytest.raises(ValueError, match="is not a blob digest"):
        Blobs(tmp_path).get("logs", digest)


def test_a_store_that_takes_nothing_is_a_fault_of_ours_and_keeps_no_half(tmp_path, monkeypatch):
    blobs = Blobs(tmp_path)

    def full(path, data):
        (tmp_path / "snapshots").mkdir(exist_ok=True)
        Path(path).write_bytes(data[:2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(blobs._fs, "pipe_file", full)
    with pytest.raises(InfraError, match="No space left") as caught:
        blobs.put("snapshots", b"workspace")
    assert caught.value.cause == "blob_refused"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_probe_leaves_nothing(tmp_path):
    Blobs(tmp_path).probe()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
