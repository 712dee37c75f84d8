import asyncio
import gc
import sys
import tempfile
from pathlib import Path

import pytest

from evener.errors import InputError
from evener.sandbox import Limits, Mount, choose, probe


async def test_runs_in_real_folders(sandbox, tmp_path):
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool/run").write_text("#!/bin/sh\npwd; echo $HOME; echo made > made\n")
    (tmp_path / "tool/run").chmod(0o755)
    mounts = (Mount(tmp_path / "tool", "/opt/evener/tool"),)
    async with sandbox("process", mounts=mounts, proxy_url="http://127.0.0.1:1") as box:
        assert box.proxy_url == "http://127.0.0.1:1"
        result = await box.exec([box.locate("/opt/evener/tool/run")], timeout=5)
        assert result.stdout.decode().split() == [box.locate("/workspace"), box.locate("/home/agent")]
        assert await box.read("/workspace/made", limit=9) == b"made\n"
        assert box.locate("/opt/evener/toolbox") == "/opt/evener/toolbox"


async def test_it_works_outside_of_any_project_and_leaves_nothing_there(sandbox):
    async with sandbox("process") as box:
        workspace = Path(box.locate("/workspace"))
        assert workspace.parent.parent == Path(tempfile.gettempdir())
        assert workspace.parent.stat().st_mode & 0o777 == 0o700
    assert not workspace.parent.exists()


async def test_a_runtime_may_reserve_more_than_the_task_s_memory(sandbox):
    reserve = "import mmap, sys; mmap.mmap(-1, int(sys.argv[1]) << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)"
    async with sandbox("process", limits=Limits(memory_bytes=512 << 20)) as box:
        codes = [(await box.exec([sys.executable, "-c", reserve, mib], timeout=20)).exit_code for mib in ("640", "2048")]
    assert codes == [0, 1]


async def test_input_that_is_not_read_is_no_error(sandbox):
    gc.collect()  # What other tests left in cycles may speak up when it is collected: before this one listens.
    await asyncio.sleep(0)
    unheard: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    async with sandbox("process") as box:
        assert (await box.exec(["sh", "-c", "exit 3"], stdin=b"x" * (1 << 20), timeout=5)).exit_code == 3
    gc.collect()
    await asyncio.sleep(0)
    assert not unheard


async def test_time_limit_kills_the_group(sandbox):
    async with sandbox("process") as box:
        result = await box.exec(["sh", "-c", "sleep 60 & sleep 60"], timeout=0.3)
        assert (result.timed_out, result.exit_code) == (True, 137)
        assert result.seconds < 5


async def test_cancelling_ends_at_once_whenever_it_comes(sandbox):
    async with sandbox("process") as box:
        for delay in (0.0, 0.001, 0.003, 0.01, 0.1):
            running = asyncio.create_task(box.exec(["sh", "-c", "sleep 60; true"], timeout=20))
            await asyncio.sleep(delay)
            running.cancel()
            done, _ = await asyncio.wait({running}, timeout=20)
            assert done


async def test_it_is_refused_for_tasks_of_others():
    with pytest.raises(InputError, match="isolates nothing"):
        await choose("process", trusted=False)
    assert await choose("process", trusted=True) == "process"


async def test_auto_falls_back_only_for_the_users_own(monkeypatch):
    async def nothing():
        return "bubblewrap is not installed"

    monkeypatch.setattr(probe, "bubblewrap_missing", nothing)
    assert await choose("auto", trusted=True) == "process"
    with pytest.raises(InputError, match="bubblewrap does not work here"):
        await choose("process", trusted=True, host="bubblewrap")
    with pytest.raises(InputError, match="bubblewrap does not work here"):
        await choose("bubblewrap", trusted=True, host="process")
    assert await choose("auto", trusted=True, host="process") == "process"
    with pytest.raises(InputError):
        await choose("auto", trusted=False)
    with pytest.raises(InputError, match="not installed"):
        await choose("bubblewrap", trusted=True)
    with pytest.raises(InputError, match="docker"):
        await choose("docker", trusted=True)
