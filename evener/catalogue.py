"""The harnesses that this version of Evener can run: what users may name in a run file, one pinned version each.

How a harness is installed and started is the runner's to know (`evener_runner.harnesses`, which takes these facts from here).
Read by the API and by ``evener harnesses``.
"""

from typing import Literal

import msgspec

Dialect = Literal["chat", "responses", "anthropic", "gemini"]
"""The model API that an agent speaks."""


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """One harness: ``profiles`` are the ways to start it, ``default`` among them."""

    name: str
    dialect: Dialect
    version: str
    profiles: tuple[str, ...]


PI = Listing(name="pi", dialect="chat", version="1.6.0", profiles=("default", "minimal"))

CATALOGUE: dict[str, Listing] = {listing.name: listing for listing in (PI,)}
