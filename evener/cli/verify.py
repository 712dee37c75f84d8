"""`evener rollouts verify`: the tokens that a rollout trains are scored again by the weights that sampled them.

A log-probability that another forward pass does not give again would make the importance ratio wrong from the first step. Each
policy version that sampled a trained token is served by a CPU engine of this command's own, from its blob; ``--engine`` names
one that runs instead, which can score only what its own version sampled. The provenance is held against the arrays as well.
"""

import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from evener.api import ApiClient, Provenance
from evener.archive import extract
from evener.blobs import Blobs
from evener.cli.connect import connect
from evener.cli.embedded import scoring_engine
from evener.cli.output import out
from evener.engines.scoring import Scorer
from evener.engines.weights import DiskWeightSink
from evener.errors import InputError
from evener.settings import Settings
from evener.trace.provenance import untrue
from evener.trace.record import Ids, Logprobs

WITHIN = 1e-3
"""Greatest difference that passes: importance ratios are then 1 within about as much."""


@dataclass(slots=True)
class Row:
    """One sequence: all arrays are equally long. ``scored`` is NaN where nothing was scored."""

    number: int
    ids: Ids
    mask: np.ndarray
    logprobs: Logprobs
    versions: Ids
    provenance: Provenance | None
    scored: Logprobs = field(init=False)

    def __post_init__(self) -> None:
        self.scored = np.full(len(self.ids), np.nan, np.float32)

    def score(self, version: int, values: Logprobs) -> None:
        """Take what an engine of ``version`` says: ``values`` are of all tokens but the first."""
        here = (self.mask == 1) & (self.versions == version)
        self.scored[1:][here[1:]] = values[here[1:]]

    def difference(self) -> tuple[float, int]:
        """The largest difference, and where; (-1, 0) where nothing was scored."""
        differences = np.where(np.isnan(self.scored), -1.0, np.abs(self.scored - self.logprobs))
        place = int(differences.argmax())
        return float(differences[place]), place

    def flaw(self) -> str | None:
        """What does not hold of its provenance."""
        if self.provenance is None:
            return "it was archived without a provenance"
        return untrue(self.provenance, self.ids, self.mask, self.logprobs, self.versions)


async def verify(settings: Settings, given: str, *, engine: str | None) -> dict[str, Any]:
    """Score the sequences of a rollout again; the document that `show` prints. Raises InputError, InfraError."""
    async with connect(settings) as api:
        document: dict[str, Any] = await api.get(f"/v1/rollouts/{given}/sequences")
        rows = [_row(number, each) for number, each in enumerate(document["sequences"])]
        if not rows:
            raise InputError("not_verifiable", f"rollout {document['rollout_id']} has no sequence to train")
        _check_temperature(rows)
        policy = await _policy(api, document["rollout_id"])
        versions = sorted({int(version) for row in rows for version in np.unique(row.versions[row.mask == 1])})
        if engine is not None:
            await _score_elsewhere(engine, rows, versions)
        else:
            for version in versions:
                await _score_here(api, settings, policy, version, rows)
    return _document(document, policy, engine, rows)


def show(document: dict[str, Any]) -> None:
    """A line a sequence, and the verdict."""
    for each in document["sequences"]:
        told = f"; provenance: {each['flaw']}" if each["flaw"] else ""
        scored = f"{each['scored']} of {each['trained']} trained tokens scored"
        out.print(f"sequence {each['sequence']}: {scored}{told}", markup=False, soft_wrap=True)
    at = document["at"]
    if at is not None:
        out.print(
            f"largest difference {document['largest_difference']:.3g}: sequence {at['sequence']}, position {at['position']},"
            f" token {at['token_id']} of version {at['version']}: recorded {at['recorded']:.6f}, scored {at['scored']:.6f}",
            markup=False,
            soft_wrap=True,
        )
    out.print(
        f"verify: {'holds' if document['holds'] else 'DOES NOT HOLD'}: scored={document['scored']}"
        f" not_scored={document['not_scored']} largest_difference={document['largest_difference']} within={WITHIN}",
        markup=False,
        soft_wrap=True,
    )


def _row(number: int, document: dict[str, Any]) -> Row:
    provenance = document["provenance"]
    return Row(
        number,
        np.array(document["ids"], np.int32),
        np.array(document["mask"], np.uint8),
        np.array(document["logprobs"], np.float32),
        np.array(document["versions"], np.int32),
        None if provenance is None else msgspec.convert(provenance, Provenance),
    )


def _check_temperature(rows: list[Row]) -> None:
    for row in rows:
        for call in row.provenance.calls if row.provenance is not None else ():
            if call.temperature not in (None, 1):
                detail = f"call {call.call_id} was sampled at temperature {call.temperature}; engines score at 1"
                raise InputError("not_verifiable", detail)


async def _policy(api: ApiClient, rollout: str) -> str:
    run = (await api.get(f"/v1/rollouts/{rollout}"))["run_id"]
    return str((await api.get(f"/v1/runs/{run}"))["policy"])


async def _score_elsewhere(url: str, rows: list[Row], versions: list[int]) -> None:
    """Score on an engine that runs: only what its version sampled can be compared."""
    async with DiskWeightSink(url) as sink:
        serves = await sink.version()
    if serves not in versions:
        raise InputError("not_verifiable", f"{url} serves version {serves}; the rollout's tokens are of {versions}")
    await _score(url, rows, serves)


async def _score_here(api: ApiClient, settings: Settings, policy: str, version: int, rows: list[Row]) -> None:
    """Score what ``version`` sampled, on an engine made for it."""
    published: dict[str, Any] = await api.get(f"/v1/policies/{policy}/versions/{version}")
    async with _weights(Blobs(settings.blobs), published["weights"]) as folder, scoring_engine(settings, folder) as url:
        await _score(url, rows, version)


@asynccontextmanager
async def _weights(blobs: Blobs, digest: str | None) -> AsyncGenerator[Path]:
    """A policy folder from its blob."""
    if digest is None:
        raise InputError("not_verifiable", "a version that sampled was never published")
    with tempfile.TemporaryDirectory(prefix="evener-verify-") as place:
        folder = Path(place)
        extract(blobs.get("weights", digest), folder)
        entries = list(folder.iterdir())
        yield entries[0] if len(entries) == 1 and entries[0].is_dir() else folder


async def _score(url: str, rows: list[Row], version: int) -> None:
    async with Scorer(url) as scorer:
        model = await scorer.model()
        for row in rows:
            if ((row.mask == 1) & (row.versions == version)).any():
                row.score(version, await scorer.score(model, row.ids))


def _document(asked: dict[str, Any], policy: str, engine: str | None, rows: list[Row]) -> dict[str, Any]:
    sequences: list[dict[str, Any]] = [
        {
            "sequence": row.number,
            "tokens": len(row.ids),
            "trained": int(row.mask.sum()),
            "scored": int((~np.isnan(row.scored)).sum()),
            "largest_difference": max(row.difference()[0], 0.0),
            "flaw": row.flaw(),
        }
        for row in rows
    ]
    worst = max(rows, key=lambda row: row.difference()[0])
    largest, place = worst.difference()
    scored = sum(each["scored"] for each in sequences)
    return {
        "rollout_id": asked["rollout_id"],
        "session_id": asked["session_id"],
        "policy": policy,
        "engine": engine,
        "sequences": sequences,
        "scored": scored,
        "not_scored": sum(each["trained"] for each in sequences) - scored,
        "largest_difference": max(largest, 0.0),
        "at": None if scored == 0 else _place(worst, place),
        "holds": scored > 0 and largest <= WITHIN and not any(each["flaw"] for each in sequences),
    }


def _place(row: Row, place: int) -> dict[str, Any]:
    return {
        "sequence": row.number,
        "position": place,
        "token_id": int(row.ids[place]),
        "version": int(row.versions[place]),
        "recorded": float(row.logprobs[place]),
        "scored": float(row.scored[place]),
    }
