import asyncio
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evener.archive import tar_of_files
from evener.errors import InfraError
from evener.sandbox import Folder, Limits, Mount, SandboxSpec, cgroups, create
from evener.sandbox import bubblewrap as bubblewrap_sandbox
from evener.sandbox.folders import reap

pytestmark = pytest.mark.usefixtures("bubblewrap")


RUN = 9_000_000 + os.getpid()
"""Seconds to sleep that name this test process: runs side by side do not see each other's."""


def alive(mark: str) -> list[int]:
    """Processes of this host with ``mark`` among their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


async def shell(box, script, timeout=20.0, **options):
    return await box.exec(["sh", "-c", script], timeout=timeout, **options)


async def test_runs_as_an_unprivileged_user_in_the_workspace(sandbox):
    async with sandbox("bubblewrap") as box:
        result = await shell(box, "pwd; echo $HOME; id -u; grep -E 'CapEff|NoNewPrivs|Seccomp:' /proc/self/status; echo hi > a")
        lines = result.stdout.decode().split()
        assert lines[:2] == ["/workspace", "/home/agent"]
        assert lines[2] != "0"
        assert lines[3:] == ["CapEff:", "0000000000000000", "NoNewPrivs:", "1", "Seccomp:", "2"]
        assert await box.read("/workspace/a", limit=100) == b"hi\n"


async def test_exit_code_output_and_stdin(sandbox):
    async with sandbox("bubblewrap") as box:
        result = await shell(box, "cat; echo err >&2; exit 7", stdin=b"given")
        assert (result.exit_code, result.stdout, result.stderr, result.timed_out) == (7, b"given", b"err\n", False)
        assert (await box.exec(["/no/such/thing"], timeout=5)).exit_code == 127


async def test_output_is_bounded(sandbox):
    async with sandbox("bubblewrap") as box:
        result = await shell(box, "echo first; head -c 5000000 /dev/zero; echo last")
        assert len(result.stdout) < 300_000
        assert result.stdout.startswith(b"first\n")
        assert result.stdout.endswith(b"last\n")
        assert b"bytes left out]" in result.stdout


async def test_secrets_of_the_host_are_not_inside(sandbox, monkeypatch):
    monkeypatch.setenv("EVENER_ADMIN_TOKEN", "hush-hush")
    async with sandbox("bubblewrap", env={"GIVEN": "sk-evener-1"}) as box:
        result = await shell(
            box, "env; cat /proc/1/environ /proc/*/cmdline | tr '\\0' ' '; ls /root /home /sys; touch /x /usr/x"
        )
        seen = result.stdout + result.stderr
        assert b"GIVEN=sk-evener-1" in seen
        assert b"hush-hush" not in seen
        assert result.stdout.count(b"sk-evener-1") == 1  # in the environment, in no argument
        assert b"Read-only file system" in seen


async def test_arguments_on_the_host_hold_no_secret(sandbox):
    async with sandbox("bubblewrap", env={"GIVEN": "sk-evener-2"}) as box:
        running = asyncio.create_task(box.exec(["sleep", f"{RUN}.1"], timeout=20))
        await until(lambda: alive(f"{RUN}.1"))
        assert not alive("sk-evener-2")
        await box.kill()
        assert (await running).exit_code == 137


async def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


async def test_time_limit_kills_the_whole_tree(sandbox):
    async with sandbox("bubblewrap") as box:
        result = await shell(box, f"setsid sleep {RUN}.2 & (sleep {RUN}.2 &) ; trap '' TERM INT; sleep {RUN}.2", timeout=0.5)
        assert result.timed_out
        assert result.exit_code == 137
        assert result.seconds < 3
        assert not alive(f"{RUN}.2")


async def test_nothing_outlives_a_command_that_returned(sandbox):
    async with sandbox("bubblewrap") as box:
        result = await shell(box, f"setsid sleep {RUN}.3 & exit 0")
        assert result.exit_code == 0
        assert result.seconds < 3
        assert not alive(f"{RUN}.3")


async def test_cancelling_kills_the_tree(sandbox):
    async with sandbox("bubblewrap") as box:
        running = asyncio.create_task(box.exec(["sleep", f"{RUN}.4"], timeout=20))
        await until(lambda: alive(f"{RUN}.4"))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not alive(f"{RUN}.4")


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.02, 0.05, 0.3])
async def test_nothing_outlives_an_owner_that_is_killed(tmp_path, delay):
    script = f"""
import asyncio, sys
from pathlib import Path
from evener.sandbox import Folder, SandboxSpec, create
async def main():
    box = await create("bubblewrap", SandboxSpec(Folder.make(Path({str(tmp_path)!r}), "one", ttl_s=60)))
    running = asyncio.create_task(box.exec(["sleep", "{RUN}.7"], timeout=60))
    await asyncio.sleep(0)
    print("started", flush=True)
    await running
asyncio.run(main())
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", script, env=environment, stdout=subprocess.PIPE)
    try:
        while await owner.stdout.readline() != b"started\n":  # log lines may come first
            assert not owner.stdout.at_eof()
        await asyncio.sleep(delay)
    finally:
        owner.kill()
        await owner.wait()
    reap(tmp_path, remove_cgroup=cgroups.remove)
    await until(lambda: not alive(f"{RUN}.7"))
    assert not list(tmp_path.iterdir())


async def test_destroy_ends_what_runs(sandbox):
    async with sandbox("bubblewrap") as box:
        running = asyncio.create_task(box.exec(["sleep", f"{RUN}.5"], timeout=20))
        await until(lambda: alive(f"{RUN}.5"))
        await box.destroy()
        assert (await running).exit_code == 137
        assert not alive(f"{RUN}.5")


async def test_fork_bomb_is_bounded_and_gone(sandbox):
    async with sandbox("bubblewrap", limits=Limits(pids=40)) as box:
        # A shell that cannot fork ends: so one below the first does the forking.
        script = f"(i=0; while [ $i -lt 200 ]; do sleep {RUN}.6 & i=$((i+1)); done); exec sleep {RUN}.6"
        running = asyncio.create_task(shell(box, script, timeout=20))
        await until(lambda: len(alive(f"{RUN}.6")) > 20, seconds=15)
        await asyncio.sleep(0.3)
        assert len(alive(f"{RUN}.6")) <= 45
        await box.kill()
        result = await running
        assert b"fork" in result.stderr.lower()
        assert not alive(f"{RUN}.6")


async def test_a_fork_bomb_of_heavy_processes_dies(sandbox):
    """At its bounds of memory and processor it would need minutes to."""
    script = "import os\nx = bytearray(8 << 20)\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
    script += "    x[::4096] = b'1' * 2048\n"
    async with sandbox("bubblewrap", limits=Limits(memory_bytes=128 << 20, cpus=0.5)) as box:
        result = await box.exec(["python3", "-c", script], timeout=3)
        if result.exit_code == 127:
            pytest.skip("no python3 in the sandbox")
        assert result.timed_out or result.exit_code == 137


async def test_one_file_is_bounded(sandbox):
    async with sandbox("bubblewrap", limits=Limits(file_bytes=1 << 20)) as box:
        result = await box.exec(["sh", "-c", "head -c 3000000 /dev/zero > big; wc -c < big"], timeout=20)
        assert int(result.stdout) == 1 << 20


async def test_what_lies_in_a_folder_is_seen_with_its_modes(sandbox):
    async with sandbox("bubblewrap") as box:
        await box.exec(["sh", "-c", "mkdir d; ln -s /etc l; echo > f; chmod 640 f; chmod 500 ."], timeout=20)
        modes = await box.modes("/workspace")
        assert set(modes) == {".", "d", "l", "f"}
        assert stat.S_ISLNK(modes["l"])
        assert (modes["f"] & 0o777, modes["."] & 0o777) == (0o640, 0o500)


async def test_memory_is_bounded(sandbox):
    async with sandbox("bubblewrap", limits=Limits(memory_bytes=64 << 20)) as box:
        # Without cgroups a process may also reserve a GiB: see `Limits.data_bytes`.
        result = await shell(box, "head -c 1500000000 /dev/zero | tail -c 1500000000 | wc -c")
        assert result.stdout.strip() != b"1500000000"


async def test_without_cgroups_a_runtime_may_reserve_more_than_the_task_s_memory(sandbox, monkeypatch):
    monkeypatch.setattr(bubblewrap_sandbox, "_hierarchy", lambda: None)
    reserve = "import mmap, sys; mmap.mmap(-1, int(sys.argv[1]) << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)"
    async with sandbox("bubblewrap", limits=Limits(memory_bytes=512 << 20)) as box:
        codes = [(await box.exec(["python3", "-c", reserve, mib], timeout=20)).exit_code for mib in ("640", "2048")]
    if 127 in codes:
        pytest.skip("no python3 in /usr")
    assert codes == [0, 1]


async def test_namespaces_and_foreign_sockets_are_refused(sandbox):
    async with sandbox("bubblewrap") as box:
        result = await shell(box, "unshare -U true; echo $?; unshare -rn true; echo $?")
        assert result.stdout.split() == [b"1", b"1"]
        probe = (
            "import socket\nfor f in (40, 17, 38):\n try: socket.socket(f); print('open')\n except OSError as e: print(e.errno)"
        )
        result = await box.exec(["python3", "-c", probe], timeout=10)
        if result.exit_code != 127:
            assert result.stdout.split() == [b"97"] * 3


async def test_mounts_are_read_only_and_where_they_should_be(sandbox, tmp_path):
    (tmp_path / "given").mkdir()
    (tmp_path / "given/a").write_text("text")
    async with sandbox("bubblewrap", mounts=(Mount(tmp_path / "given", "/opt/evener/given"),)) as box:
        result = await shell(box, "cat /opt/evener/given/a; echo x > /opt/evener/given/a")
        assert result.stdout == b"text"
        assert b"Read-only" in result.stderr


async def test_uploaded_files_belong_to_the_agent_and_come_back(sandbox):
    async with sandbox("bubblewrap") as box:
        await box.upload(tar_of_files({"deep/key": b"k"}), "/home/agent")
        result = await shell(box, "cat ~/deep/key; echo more >> ~/deep/key; mkdir -m 0 shut; ln -s /etc/passwd out")
        assert result.stdout == b"k"
        assert await box.read("/home/agent/deep", limit=9) is None
        assert await box.read("/workspace/out", limit=9) is None
        assert (await box.snapshot("/workspace")).left_out == ["out: a link out of the folder"]


async def test_a_broken_mount_is_our_fault(sandbox, tmp_path):
    async with sandbox("bubblewrap", mounts=(Mount(tmp_path / "absent", "/opt/absent"),)) as box:
        with pytest.raises(InfraError, match="absent"):
            await shell(box, "true")


async def test_many_at_once(sandbox):
    async with sandbox("bubblewrap") as box:
        results = await asyncio.gather(*(shell(box, f"echo {number}; exit {number}") for number in range(20)))
        assert [result.exit_code for result in results] == list(range(20))


async def test_the_end_of_a_sandbox_is_not_that_of_another_of_its_name(tmp_path):
    """Runner and verifier of one host each make a trial called ``probe`` when a stack starts."""
    one, other = [
        await create("bubblewrap", SandboxSpec(Folder.make(tmp_path / root, "probe", ttl_s=60))) for root in ("one", "other")
    ]
    running = asyncio.create_task(one.exec(["sh", "-c", "echo > /workspace/began; sleep 2"], timeout=30))
    async with asyncio.timeout(20):
        while await one.read("/workspace/began", limit=1) is None:
            await asyncio.sleep(0.02)
    await other.destroy()
    result = await running
    await one.destroy()
    assert result.exit_code == 0
