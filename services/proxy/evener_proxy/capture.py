"""What is kept of a call: its record, whole and exact, and the little that the next call of its session is compared with.

Called by `evener_proxy.calls`.
"""

import hashlib
import time
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np

from evener.engines.sampler import Sample
from evener.trace.prefix import Head, find_base, find_messages_base, message_digests, prefix_digests
from evener.trace.record import NO_BASE, CallRecord, Ids, encode
from evener.trace.store import Commit, Intent, OpenedSession, Sending
from evener_proxy.canonical import CallRequest, Reply
from evener_proxy.engines import Engine
from evener_proxy.token_in.prompts import Choice


@dataclass(slots=True)
class Asked:
    """A sample and where it came from. ``choice``: how its prompt was given, in prompt mode ``token_in``."""

    sample: Sample
    engine: Engine
    used: dict[str, Any]
    dispatched: int
    completed: int
    choice: Choice | None = None


class Call:
    """What is known of a call before it is sampled. ``texts``: its system texts and tool list by digest. ``settled``: it was
    committed, or what becomes of its commit is seen to. ``sampling``: an engine was asked for it, and has not failed since.
    """

    def __init__(
        self,
        call_id: str,
        session: OpenedSession,
        request: CallRequest,
        dialect: str,
        prefix: str,
        started: float,
        sending: Sending,
    ) -> None:
        self.id = call_id
        self.session = session
        self.request = request
        self.dialect = dialect
        self.prefix = prefix
        self.started = started
        self.sending = sending
        self.failures = 0
        self.settled = False
        self.sampling = False
        self.system_digests = [_digest(message) for message in request.messages[: request.systems]]
        self.tools_digest = _digest(request.tools) if request.tools is not None else None
        self.texts = dict(zip(self.system_digests, request.messages, strict=False))
        if self.tools_digest is not None and request.tools is not None:
            self.texts[self.tools_digest] = request.tools


def to_commit(call: Call, intent: Intent, asked: Asked, reply: Reply) -> tuple[CallRecord, Commit]:
    """The record of a call, and the same as the store takes it."""
    sample, request = asked.sample, call.request
    views = [memoryview(message) for message in request.messages]
    counts = message_digests(views, [len(views), *(head.messages for head in intent.heads)])
    kept = find_messages_base(intent.heads, counts)
    prompt, total = len(sample.prompt_ids), len(sample.prompt_ids) + len(sample.completion_ids)
    lengths = [prompt, total, *(length for head in intent.heads for length in (head.prompt, head.total) if length <= prompt)]
    digests = prefix_digests(np.concatenate((sample.prompt_ids, sample.completion_ids)), lengths)
    record = CallRecord(
        call_id=call.id,
        session_id=call.session.spec.session_id,
        number=intent.number,
        prompt_ids=sample.prompt_ids,
        completion_ids=sample.completion_ids,
        logprobs=sample.logprobs,
        versions=_versions(asked),
        version_dispatch=asked.dispatched,
        version_completion=asked.completed,
        request={
            "system_digests": call.system_digests,
            "tools_digest": call.tools_digest,
            "messages": request.messages[max(request.systems, kept.shared) :],
            "messages_base": kept.number,
            "messages_kept": kept.shared,
            "asked": request.asked,
            "used": asked.used,
            **({"flaw": sample.flaw} if sample.flaw is not None else {}),
            **({"prompt": asked.choice.document()} if asked.choice is not None else {}),
        },
        reply=cast("dict[str, Any]", msgspec.to_builtins(reply)),
        dialect=call.dialect,
        started=call.started,
        ended=time.time(),
        delivered="unknown",
        level=sample.level,
        engine=asked.engine.sampler.name,
    )
    commit = Commit(
        call_id=call.id,
        number=intent.number,
        record=encode(record, find_base(intent.heads, digests) if prompt else NO_BASE),
        head=Head(
            intent.number, prompt, total, len(views), digests.get(prompt, b""), digests.get(total, b""), counts[len(views)]
        ),
        sampled=sample.completion_tokens,
        prompt_tokens=sample.prompt_tokens,
        failures=call.failures,
        texts={
            digest: bytes(text) for (digest, text), known in zip(call.texts.items(), intent.known, strict=True) if not known
        },
    )
    return record, commit


def _versions(asked: Asked) -> Ids:
    """Per token; the version at dispatch, the oldest that it can be, where the engine does not say."""
    if asked.sample.versions is not None:
        return asked.sample.versions
    return np.full(len(asked.sample.completion_ids), asked.dispatched, np.int32)


def _digest(text: msgspec.Raw) -> str:
    return hashlib.sha256(memoryview(text)).hexdigest()
