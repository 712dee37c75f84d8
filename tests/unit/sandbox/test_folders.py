import json
import os
import subprocess
import sys
import tempfile
import time

from evener.sandbox.folders import LABEL, Folder, reap


def reaped(root):
    return reap(root, remove_cgroup=lambda path: None)


def test_a_living_owner_keeps_his_folder(tmp_path):
    folder = Folder.make(tmp_path, "mine", ttl_s=60)
    assert reaped(tmp_path) == []
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.remove()
    folder.remove()
    assert reaped(tmp_path) == []


def test_a_dead_owners_folder_goes(tmp_path):
    script = (
        f"from pathlib import Path; from evener.sandbox import Folder; Folder.make(Path({str(tmp_path)!r}), 'his', ttl_s=60)"
    )
    subprocess.run(
        [sys.executable, "-c", script], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, timeout=60
    )
    removed = []
    label = json.loads((tmp_path / "his" / LABEL).read_text())
    (tmp_path / "his" / LABEL).write_text(json.dumps(label | {"cgroups": ["/sys/fs/cgroup/evener/his"]}))
    assert reap(tmp_path, remove_cgroup=lambda path: removed.append(str(path))) == ["his"]
    assert removed == ["/sys/fs/cgroup/evener/his"]


def test_elsewhere_only_the_expiry_speaks(tmp_path):
    for name, expires in (("early", time.time() - 1), ("late", time.time() + 60)):
        Folder.make(tmp_path, name, ttl_s=60)
        label = {"namespace": "another boot", "pid": 1, "started": "0", "expires": expires, "cgroups": []}
        (tmp_path / name / LABEL).write_text(json.dumps(label))
    assert reaped(tmp_path) == ["early"]


def test_a_recycled_process_id_is_not_the_owner(tmp_path):
    folder = Folder.make(tmp_path, "old", ttl_s=60)
    label = json.loads((folder.path / LABEL).read_text())
    (folder.path / LABEL).write_text(json.dumps(label | {"started": "1"}))
    assert reaped(tmp_path) == ["old"]


def test_an_unlabelled_folder_gets_a_minute(tmp_path):
    (tmp_path / "young").mkdir()
    (tmp_path / "old").mkdir()
    os.utime(tmp_path / "old", (1, 1))
    assert reaped(tmp_path) == ["old"]


def test_closed_contents_do_not_stay(tmp_path):
    folder = Folder.make(tmp_path, "shut", ttl_s=60)
    (folder.path / "a/b").mkdir(parents=True)
    (folder.path / "a/b/c").write_text("x")
    (folder.path / "a/b").chmod(0)
    (folder.path / "a").chmod(0)
    folder.remove()
    assert not folder.path.exists()


def test_what_lies_outside_goes_with_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    folder = Folder.make(tmp_path / "sandboxes", "one", ttl_s=-1)
    outside = folder.make_outside()
    (outside / "closed").mkdir(mode=0)
    assert outside.parent == tmp_path / "tmp"
    assert reap(tmp_path / "sandboxes", remove_cgroup=lambda _: None) == ["one"]
    assert not outside.exists()
