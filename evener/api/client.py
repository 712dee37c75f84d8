"""The workers' way to the orchestrator: every call has a deadline, and an answer is a struct, a refusal or a fault of ours.

A refusal (409) means that the ledger has gone on without the caller: it drops what it holds. A connection that fails is
tried again with back-off until ``patience_s`` is over, since each request is idempotent.
"""

import contextlib
from typing import Any

import msgspec

from evener.api.types import GroupOrder, Heartbeat, LearnerLease, RolloutLease, ScoreOrder, VersionGrant
from evener.errors import InfraError, InputError
from evener.service_client import ServiceClient
from evener.tasks import task_digest


class Refused(Exception):
    """The ledger refused: another holds the lease, the epoch is old, or the object is past that state."""


class _Problem(msgspec.Struct):
    """Body of an error."""

    detail: str
    cause: str = ""


class ApiClient(ServiceClient):
    """A session with the API at ``url``; use it as an async context manager."""

    UNAVAILABLE = "api_unavailable"
    REQUEST_S = 60.0
    LONGEST_PAUSE_S = 5.0

    def __init__(self, url: str, token: str, *, patience_s: float = 60.0) -> None:
        super().__init__(url, token, patience_s=patience_s)

    async def claim_rollout(self, session: str, *, runner: str) -> RolloutLease:
        """Claim an attempt. Raises Refused where its lease is held or the attempt is over."""
        return msgspec.json.decode(
            await self.request("POST", f"/v1/attempts/{session}/claim", {"runner": runner}), type=RolloutLease
        )

    async def heartbeat(self, session: str, *, lease: str) -> Heartbeat:
        """Prolong a lease. Raises Refused where it is lost."""
        return msgspec.json.decode(
            await self.request("POST", f"/v1/attempts/{session}/heartbeat", {"lease": lease}), type=Heartbeat
        )

    async def scoring(self, session: str, *, begins: bool = True) -> ScoreOrder:
        """What to score, for whoever ``begins``; else that it is still scored. Raises Refused where the attempt is past it."""
        path = f"/v1/attempts/{session}/scoring" + ("?begins=true" if begins else "")
        return msgspec.json.decode(await self.request("POST", path), type=ScoreOrder)

    async def claim_policy(self, policy: str, *, learner: str) -> LearnerLease | None:
        """Become the policy's learner; None where no run trains it now. Raises Refused while another learner holds it."""
        body = await self.request("POST", f"/v1/policies/{policy}/learner", {"learner": learner})
        return msgspec.json.decode(body, type=LearnerLease | None)

    async def hold_policy(self, policy: str, *, epoch: int) -> Heartbeat:
        """Prolong a learner's lease. Raises Refused where the epoch is old."""
        body = await self.request("POST", f"/v1/policies/{policy}/learner/heartbeat", {"epoch": epoch})
        return msgspec.json.decode(body, type=Heartbeat)

    async def release_policy(self, policy: str, *, epoch: int, step: int) -> None:
        """End a learner's lease; ``step`` is the last that it has reported. Raises Refused where the epoch is old."""
        await self.request("POST", f"/v1/policies/{policy}/learner/release", {"epoch": epoch, "step": step})

    async def claim_group(self, group: str, *, epoch: int) -> GroupOrder:
        """Fetch a closed group to train it. Raises Refused where it was disposed of or the epoch is old."""
        return msgspec.msgpack.decode(
            await self.request("POST", f"/v1/groups/{group}/claim", {"epoch": epoch}), type=GroupOrder
        )

    async def allot_version(self, policy: str, *, epoch: int, step: int) -> VersionGrant:
        """Ask for the number of the next publication. Raises Refused where the epoch is old."""
        return msgspec.json.decode(
            await self.request("POST", f"/v1/policies/{policy}/versions", {"epoch": epoch, "step": step}),
            type=VersionGrant,
        )

    async def upload_task(self, name: str, family: str, agent: bytes, grader: bytes) -> str:
        """Store a task's two bundles and return the task's digest; what the API has is not sent again."""
        digest = task_digest(agent, grader)
        body = msgspec.msgpack.encode({"id": name, "family": family, "agent": agent, "grader": grader})
        await self.request("PUT", f"/v1/tasks/{digest}", body, kind="application/msgpack")
        return digest

    async def upload_policy(self, archive: bytes) -> str:
        """Store a policy folder (a tar file) and return the blob's digest."""
        answer = await self.request("PUT", "/v1/policies", archive, kind="application/x-tar")
        return str(msgspec.json.decode(answer)["weights"])

    async def get(self, path: str, **query: str) -> Any:
        """Any JSON document of the API."""
        suffix = "?" + "&".join(f"{name}={value}" for name, value in query.items()) if query else ""
        return msgspec.json.decode(await self.request("GET", path + suffix))

    async def post(self, path: str, body: object = None) -> Any:
        """Post a JSON document to any path of the API."""
        return msgspec.json.decode(await self.request("POST", path, body))

    async def request(self, method: str, path: str, body: object = None, *, kind: str = "application/json") -> bytes:
        """One request, tried again while the API does not answer. Raises Refused, InputError or InfraError."""
        data = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
        status, content = await self._answer(method, path, data, kind=kind)
        return _checked(status, content, f"{method} {path}")


def _checked(status: int, content: bytes, what: str) -> bytes:
    if status < 400:
        return content
    problem = _Problem(detail=content.decode(errors="replace"))
    with contextlib.suppress(msgspec.DecodeError):
        problem = msgspec.json.decode(content, type=_Problem)
    text = problem.detail
    if problem.cause == "stack_in_use":
        raise InputError(problem.cause, text)
    if status == 409:
        raise Refused(f"{what}: {text}")
    if status == 404:
        raise InputError("not_found", text)
    if status == 401:
        raise InfraError("api_refused", what)
    raise InputError("request_invalid", f"{what}: {text}")
