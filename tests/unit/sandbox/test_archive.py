import gzip
import io
import os
import subprocess
import tarfile

import pytest

from evener import archive
from evener.archive import UnsafeArchive, extract, tar_of_files, tar_of_folder


def tar(*members):
    """A tar file of (name, type, content or link target)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, kind, text in members:
            info = tarfile.TarInfo(name)
            info.type, info.mode = kind, 0o7777
            content = text.encode() if kind == tarfile.REGTYPE else b""
            info.linkname = "" if kind == tarfile.REGTYPE else text
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


FILE, LINK, HARD, FOLDER, FIFO, DEVICE = (
    tarfile.REGTYPE,
    tarfile.SYMTYPE,
    tarfile.LNKTYPE,
    tarfile.DIRTYPE,
    tarfile.FIFOTYPE,
    tarfile.CHRTYPE,
)


def test_files_folders_and_inner_links(tmp_path):
    members = [("./a", FOLDER, ""), ("a/b", FILE, "text"), ("c/d", LINK, "../a/b"), ("e", HARD, "a/b"), (".", FOLDER, "")]
    extract(tar(*members), tmp_path / "target")
    for name in ("a/b", "c/d", "e"):
        assert (tmp_path / "target" / name).read_text() == "text"
    assert (tmp_path / "target/a/b").stat().st_mode & 0o7777 == 0o755


@pytest.mark.parametrize(
    "members",
    [
        [("../x", FILE, "")],
        [("/x", FILE, "")],
        [("a/../../x", FILE, "")],
        [("x", LINK, "/etc/passwd")],
        [("x", LINK, "../x")],
        [("here", LINK, "."), ("x", LINK, "here/here/../../x")],
        [("x", LINK, "."), ("x/y", FILE, "")],
        [("x", LINK, "."), ("x/y", LINK, "..")],
        [("x", LINK, "y"), ("z", HARD, "x")],
        [("x", HARD, "../../etc/passwd")],
        [("x", FIFO, "")],
        [("x", DEVICE, "")],
    ],
)
def test_what_would_leave_the_folder_is_refused(tmp_path, members):
    with pytest.raises(UnsafeArchive):
        extract(tar(*members), tmp_path / "inner/target")
    assert not os.path.lexists(tmp_path / "inner/x")


def test_a_file_is_not_written_through_a_link(tmp_path):
    with pytest.raises(OSError, match="exists"):
        extract(tar(("x", LINK, "y"), ("x", FILE, "")), tmp_path)


def test_over_what_is_in_the_way(tmp_path):
    """Links are removed and not followed, closed folders opened; what is not in the way stays."""
    folder, outside = tmp_path / "target", tmp_path / "outside"
    (folder / "kept").mkdir(parents=True)
    (folder / "kept/old").write_text("old")
    outside.mkdir()
    (outside / "file").write_text("outside")
    (folder / "link").symlink_to(outside)
    (folder / "file").symlink_to(outside / "file")
    (folder / "folder/deep").mkdir(parents=True)
    (folder / "folder/deep").chmod(0)
    (folder / "plain").write_text("in the way of a folder")
    members = [
        ("kept/new", FILE, "1"),
        ("link/file", FILE, "2"),
        ("file", FILE, "3"),
        ("folder", FILE, "4"),
        ("plain/a", FILE, "5"),
    ]
    with pytest.raises((UnsafeArchive, OSError)):
        extract(tar(*members), folder)
    extract(tar(*members), folder, over=True)
    found = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert found == {"kept/old": "old", "kept/new": "1", "link/file": "2", "file": "3", "folder": "4", "plain/a": "5"}
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"file": "outside"}


def test_round_trip(tmp_path):
    extract(tar_of_files({"a/b/c": b"1", "d": b"2"}), tmp_path / "one")
    extract(tar_of_folder(tmp_path / "one"), tmp_path / "two")
    assert (tmp_path / "two/a/b/c").read_bytes() == b"1"
    assert (tmp_path / "two/a").stat().st_mode & 0o777 == 0o700


def test_what_unpacks_to_more_than_it_weighs_is_refused(tmp_path, monkeypatch):
    bomb = tar(("a", FILE, "0" * 1_000_000))
    with pytest.raises(tarfile.TarError):
        extract(gzip.compress(bomb), tmp_path / "compressed")
    monkeypatch.setattr(archive, "MAX_BYTES", 3_000_000)
    with pytest.raises(UnsafeArchive, match="over"):
        extract(tar(("a", FILE, "0" * 1_000_000), ("b", HARD, "a"), ("c", HARD, "a"), ("d", HARD, "a")), tmp_path / "links")
    monkeypatch.setattr(archive, "MAX_ENTRIES", 3)
    with pytest.raises(UnsafeArchive, match="over 3 entries"):
        extract(tar(*((str(number), FOLDER, "") for number in range(4))), tmp_path / "many")


def test_a_sparse_file_is_refused(tmp_path):
    holes = tmp_path / "holes"
    with holes.open("wb") as file:
        file.truncate(1 << 40)
    packed = tmp_path / "holes.tar"
    subprocess.run(["tar", "--sparse", "-cf", packed, "-C", tmp_path, "holes"], check=True)
    assert packed.stat().st_size < 1 << 20
    with pytest.raises(UnsafeArchive, match="sparse"):
        extract(packed.read_bytes(), tmp_path / "target")
