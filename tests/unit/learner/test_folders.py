import io
import tarfile
from pathlib import Path

import pytest

from evener.errors import InfraError
from evener_learner.folders import Position, pack_folder, read_position, unpack_folder, write_position


def filled(folder: Path) -> Path:
    (folder / "deep").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "deep" / "model.safetensors").write_bytes(bytes(range(256)))
    return folder


def test_a_folder_comes_back(tmp_path: Path) -> None:
    data = pack_folder(filled(tmp_path / "a"))
    back = unpack_folder(data, tmp_path / "b")
    assert (back / "deep" / "model.safetensors").read_bytes() == bytes(range(256))
    assert pack_folder(back) == data


def test_the_same_files_are_the_same_bytes(tmp_path: Path) -> None:
    first, second = filled(tmp_path / "a"), filled(tmp_path / "b")
    (second / "config.json").touch()
    (second / "config.json").chmod(0o600)
    assert pack_folder(first) == pack_folder(second)


def test_an_archive_of_one_folder_is_entered(tmp_path: Path) -> None:
    filled(tmp_path / "outer" / "policy")
    assert (unpack_folder(pack_folder(tmp_path / "outer"), tmp_path / "b") / "config.json").exists()


def test_an_archive_cannot_write_elsewhere(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("../out"))
    with pytest.raises(InfraError):
        unpack_folder(buffer.getvalue(), tmp_path / "b")
    assert not (tmp_path / "out").exists()


def test_damage_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(InfraError):
        unpack_folder(b"no archive", tmp_path / "b")
    with pytest.raises(InfraError):
        read_position(tmp_path)


def test_a_position_comes_back(tmp_path: Path) -> None:
    position = Position(step=3, version=5, published=[1, 4, 5])
    write_position(tmp_path, position)
    assert read_position(tmp_path) == position
