"""What a thread writes into a sandbox's folder is written before anybody removes that folder.

A thread cannot be stopped: where its caller is cancelled and goes on to clean up, the thread would write into a folder that
is being removed, and leave a part of it behind. Used wherever files of a sandbox are made or read in a thread.
"""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Like `asyncio.to_thread`; cancelled, it ends when the thread has."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            try:
                await asyncio.wait({work})
            except asyncio.CancelledError:
                continue
        if not work.cancelled():
            work.exception()  # nobody else asks for it
        raise
