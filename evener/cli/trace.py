"""A rollout as the policy saw it: the conversation, token by token, each with its loss mask and log-probability.

A token that is trained is coloured by how surprising it was to the policy that sampled it; everything else is dim.
"""

import io
import tarfile
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from rich.text import Text

from evener.blobs import Blobs
from evener.cli.output import out
from evener.errors import InfraError

Decode = Callable[[int], str]


def print_trace(trace: dict[str, Any], sequences: list[dict[str, Any]], decode: Decode) -> None:
    """Print every sequence of a rollout with its calls."""
    calls = {call["call_id"]: call for call in trace["calls"]}
    for number, sequence in enumerate(sequences, 1):
        trained = sum(sequence["mask"])
        out.rule(f"sequence {number}/{len(sequences)}: {len(sequence['ids'])} tokens, {trained} trained", align="left")
        for span in sequence["spans"]:
            _print_span(sequence, span, calls.get(span["call_id"]), decode)


def _print_span(sequence: dict[str, Any], span: dict[str, Any], call: dict[str, Any] | None, decode: Decode) -> None:
    start, end = span["start"], span["end"]
    version = max(sequence["versions"][start:end], default=0)
    title = f"[{start}:{end}] {span['kind']}"
    if call is not None and version:
        title += f" by version {version}, call {call['number']}, {call['reply'].get('finish_reason')}"
    out.print(Text(title, style="bold"))
    if span["kind"] == "prompt" and call is not None and call["fork"]:
        out.print(Text(f"  {_fork(call)}", style="yellow"), soft_wrap=True)
    ids, mask, logprobs = (sequence[name][start:end] for name in ("ids", "mask", "logprobs"))
    out.print(_tokens(ids, mask, logprobs, decode), soft_wrap=True)
    if any(mask):
        rows = [f"{decode(t)!r}:{m}:{p:.3f}" for t, m, p in zip(ids, mask, logprobs, strict=True)]
        out.print(Text("  token:mask:logprob  " + "  ".join(rows), style="dim"), soft_wrap=True)


def _fork(call: dict[str, Any]) -> str:
    """Why a call left the line, and the first difference from the call that it left."""
    return f"{call['fork']}, from token {call['fork_position']} on: was {call['fork_was']!r}, is {call['fork_now']!r}"


def _tokens(ids: Sequence[int], mask: Sequence[int], logprobs: Sequence[float], decode: Decode) -> Text:
    text = Text()
    for token, masked, logprob in zip(ids, mask, logprobs, strict=True):
        text.append(decode(token), style=_style(logprob) if masked else "dim")
    return text


def _style(logprob: float) -> str:
    if logprob > -0.1:
        return "green"
    return "yellow" if logprob > -2 else "red"


def token_decoder(blobs: Blobs, weights: str) -> Decode:
    """The text of one token id, from the tokenizer in a policy's blob."""
    with tarfile.open(fileobj=io.BytesIO(blobs.get("weights", weights))) as archive:
        member = archive.extractfile("tokenizer.json")
        if member is None:
            raise InfraError("blob_missing", f"tokenizer.json in {weights}")
        document = member.read()
    try:
        from tokenizers import Tokenizer
    except ImportError:
        vocabulary = {number: token for token, number in msgspec.json.decode(document)["model"]["vocab"].items()}
        return lambda token: vocabulary.get(token, f"<{token}>")
    tokenizer = Tokenizer.from_str(document.decode())
    return lambda token: tokenizer.decode([token], skip_special_tokens=False)
