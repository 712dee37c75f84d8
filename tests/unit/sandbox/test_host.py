"""What is decided from the host: limits, filters, the initial workspace."""

import struct
from pathlib import Path

import pytest

from evener.errors import TaskError
from evener.sandbox import cgroups, interpreter, seccomp
from evener.sandbox.initial import lay_out
from evener.sandbox.port import Limits


def run_filter(code, number, argument=0, architecture=0xC000003E):
    """Interpret a classic BPF program over a struct seccomp_data."""
    data = struct.pack("<iIQQ", number, architecture, 0, argument)
    position, accumulator = 0, 0
    while True:
        operation, true, false, operand = struct.unpack_from("<HBBI", code, 8 * position)
        position += 1
        match operation:
            case 0x20:
                accumulator = struct.unpack_from("<I", data, operand)[0]
            case 0x15:
                position += true if accumulator == operand else false
            case 0x35:
                position += true if accumulator >= operand else false
            case 0x45:
                position += true if accumulator & operand else false
            case 0x06:
                return operand
            case _:
                pytest.fail(f"no such operation: {operation:#x}")


ALLOW, KILL, EPERM, ENOSYS, EAFNOSUPPORT = 0x7FFF0000, 0x80000000, 0x50001, 0x50026, 0x50061


@pytest.mark.parametrize(
    ("machine", "architecture", "clone", "socket", "ptrace", "read"),
    [("x86_64", 0xC000003E, 56, 41, 101, 0), ("aarch64", 0xC00000B7, 220, 198, 117, 63)],
)
def test_seccomp_filter(machine, architecture, clone, socket, ptrace, read):
    code = seccomp.program(machine)

    def verdict(number, argument=0):
        return run_filter(code, number, argument, architecture)

    assert verdict(read) == ALLOW
    assert verdict(ptrace) == EPERM
    assert verdict(435) == ENOSYS
    assert verdict(clone, 0x11) == ALLOW
    assert verdict(clone, 0x10000011) == EPERM
    assert [verdict(socket, family) for family in (1, 2, 10, 16)] == [ALLOW] * 4
    assert [verdict(socket, family) for family in (17, 38, 40)] == [EAFNOSUPPORT] * 3
    assert run_filter(code, read, 0, 0x40000003) == KILL
    assert seccomp.program("riscv64") is None


def test_cgroups_of_version_2(tmp_path):
    root = tmp_path / "cgroup"
    (root / "user").mkdir(parents=True)
    (root / "cgroup.controllers").write_text("memory pids cpu")
    (tmp_path / "own").write_text("0::/user\n")
    (root / "user/evener").mkdir()
    hierarchy = cgroups.find(root, tmp_path / "own")
    assert hierarchy == cgroups.Hierarchy(2, dict.fromkeys(("memory", "pids", "cpu"), root / "user/evener"))
    made = hierarchy.make("one", Limits(memory_bytes=1 << 20, pids=7, cpus=0.5))
    assert {file.name: file.read_text() for file in made.paths[0].iterdir()} == {
        "memory.max": "1048576",
        "memory.swap.max": "0",
        "pids.max": "7",
        "cpu.max": "50000 100000",
    }
    made.add(123)
    assert (made.paths[0] / "cgroup.procs").read_text() == "123"
    bounds = {name: (made.paths[0] / name).read_text() for name in ("memory.max", "cpu.max")}
    with made.loosened():
        assert (made.paths[0] / "memory.max").read_text() == "max"
        assert (made.paths[0] / "cpu.max").read_text() == "max 100000"
    assert {name: (made.paths[0] / name).read_text() for name in bounds} == bounds


def test_no_cgroups(tmp_path):
    (tmp_path / "own").write_text("0::/\n")
    assert cgroups.find(tmp_path / "absent", tmp_path / "own") is None
    assert cgroups.find(tmp_path, tmp_path / "absent") is None


def test_the_interpreter_is_a_real_file_outside_any_virtual_environment():
    assert interpreter.executable().is_file()
    assert not interpreter.executable().is_symlink()
    assert all(path.exists() for path in interpreter.files())


def environment(tmp_path, dockerfile):
    folder = tmp_path / "environment"
    (folder / "src/deep").mkdir(parents=True)
    (folder / "src/deep/a.py").write_text("a")
    (folder / "b.txt").write_text("b")
    (folder / "Dockerfile").write_text(dockerfile)
    return folder


def tree(folder: Path):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("dockerfile", "files"),
    [
        ("FROM debian\nWORKDIR /workspace\nCOPY src .\n", ["deep/a.py"]),
        ("FROM debian\n# note\nCOPY src/deep/a.py b.txt \\\n  into/\n", ["into/a.py", "into/b.txt"]),
        ('FROM x\nCOPY ["b.txt", "/workspace/c"]\nCOPY b.txt d.txt', ["c", "d.txt"]),
        ("FROM x\nCOPY . /workspace/", ["Dockerfile", "b.txt", "src/deep/a.py"]),
        ("FROM x\nCOPY *.txt ./", ["b.txt"]),
    ],
)
def test_copy_lines_make_the_workspace(tmp_path, dockerfile, files):
    lay_out(environment(tmp_path, dockerfile), tmp_path / "workspace")
    assert tree(tmp_path / "workspace") == files


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("RUN pip install x", "line 2: RUN pip install x"),
        ("WORKDIR /app", "works in /workspace"),
        ("COPY b.txt /etc/", "not below /workspace"),
        ("COPY ../x .", "not in environment/"),
        ("COPY absent .", "not in environment/"),
        ("COPY --from=build a b", "only COPY"),
    ],
)
def test_what_needs_a_container_engine_is_refused(tmp_path, line, why):
    with pytest.raises(TaskError, match=why) as caught:
        lay_out(environment(tmp_path, f"FROM debian\n{line}\n"), tmp_path / "workspace")
    assert caught.value.cause == "task_setup"


def test_a_workspace_folder_comes_first(tmp_path):
    folder = environment(tmp_path, "RUN impossible")
    (folder / "workspace").mkdir()
    (folder / "workspace/file").write_text("x")
    lay_out(folder, tmp_path / "workspace")
    assert tree(tmp_path / "workspace") == ["file"]
