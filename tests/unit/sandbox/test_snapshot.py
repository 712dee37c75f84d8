import io
import os
import socket
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener import removal
from evener.archive import extract
from evener.sandbox import snapshot


def names(taken):
    with tarfile.open(fileobj=io.BytesIO(taken.tar)) as archive:
        return {member.name: member for member in archive}


def test_files_folders_and_inner_links(tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/file").write_text("content")
    (tmp_path / "a/b/up").symlink_to("../file")
    (tmp_path / "absolute").symlink_to("/workspace/a/file")
    taken = snapshot.take(tmp_path, "/workspace")
    members = names(taken)
    assert list(members) == ["a", "a/b", "a/b/up", "a/file", "absolute"]
    assert members["absolute"].linkname == "a/file"
    assert taken.left_out == []
    target = tmp_path / "target"
    target.mkdir()
    extract(taken.tar, target)
    assert (target / "a/b/up").read_text() == (target / "absolute").read_text() == "content"


def test_what_could_act_on_a_reader_is_left_out(tmp_path, monkeypatch):
    (tmp_path / "good").write_text("good")
    (tmp_path / "etc").symlink_to("/etc/passwd")
    (tmp_path / "up").symlink_to("../../secret")
    (tmp_path / "like").symlink_to("/workspace-else/x")
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.chdir(tmp_path)
    socket.socket(socket.AF_UNIX).bind("socket")
    if os.geteuid() == 0:
        os.mknod("device", 0o600 | 0o020000, os.makedev(1, 3))
    taken = snapshot.take(tmp_path, "/workspace")
    assert list(names(taken)) == ["good"]
    assert {entry.split(":")[0] for entry in taken.left_out} >= {"etc", "up", "like", "fifo", "socket"}


def test_size_and_number_are_bounded(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 5000)
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 42)  # a sparse file
    (tmp_path / "z").write_bytes(b"z")
    taken = snapshot.take(tmp_path, "/workspace", max_bytes=20000)
    assert list(names(taken)) == ["a", "z"]
    assert "huge" in taken.left_out[0]
    assert "over 2 entries" in snapshot.take(tmp_path, "/workspace", max_entries=2).left_out[-1]


@pytest.mark.parametrize("target", ["up/../x", "here/here/../../etc/passwd", "a/..", "../../x"])
def test_a_link_that_steps_up_beyond_another_link_is_left_out(tmp_path, target):
    """``here -> .`` makes ``here/here/../..`` two folders above, though its words cancel out."""
    (tmp_path / "here").symlink_to(".")
    (tmp_path / "answer").symlink_to(target)
    taken = snapshot.take(tmp_path, "/workspace")
    assert list(names(taken)) == ["here"]
    assert taken.left_out == ["answer: a link out of the folder"]


def test_folders_by_the_thousand_are_cut_off(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    here = os.open(root, os.O_RDONLY)
    for _ in range(2000):
        os.mkdir("deep", dir_fd=here)
        inner = os.open("deep", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    try:
        taken = snapshot.take(root, "/workspace")
        assert 1 < len(names(taken)) <= snapshot.MAX_DEPTH + 1
        assert "too deep" in taken.left_out[0]
    finally:
        removal.remove(root)  # pytest itself cannot, and would fail in each later session
    assert not root.exists()


def test_bytes_depend_on_content_alone(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for file in ("a", "b") if name == "one" else ("b", "a"):
            (tmp_path / name / file).write_text(file)
    os.utime(tmp_path / "two/a", (1, 1))
    assert snapshot.take(tmp_path / "one", "/w").tar == snapshot.take(tmp_path / "two", "/w").tar


def test_closed_folders_and_files_are_opened(tmp_path):
    (tmp_path / "shut").mkdir()
    (tmp_path / "shut/file").write_text("x")
    (tmp_path / "shut/file").chmod(0)
    (tmp_path / "shut").chmod(0)
    assert "shut/file" in names(snapshot.take(tmp_path, "/workspace"))


@given(
    depth=st.integers(0, 3),
    target=st.lists(st.sampled_from(["..", "a", ".", "b"]), min_size=1, max_size=6),
    absolute=st.booleans(),
)
def test_a_link_that_is_kept_stays_inside(depth, target, absolute):
    name = "/".join(["d"] * depth + ["link"])
    text = ("/workspace/" if absolute else "") + "/".join(target)
    kept = snapshot._inner_target(name, text, "/workspace")
    if kept is not None:
        resolved = os.path.normpath(Path("/workspace") / Path(name).parent / kept)
        assert (resolved + "/").startswith("/workspace/")


@pytest.mark.parametrize("mode", [0o4755, 0o2755])
def test_set_user_bits_are_dropped(tmp_path, mode):
    (tmp_path / "x").write_text("x")
    (tmp_path / "x").chmod(mode)
    assert names(snapshot.take(tmp_path, "/w"))["x"].mode == 0o755
