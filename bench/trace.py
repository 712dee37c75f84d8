"""What a trace costs: time from records to training rows, bytes that a captured turn takes, tokens that a chain spares.

``python -m bench.trace [--repetitions 20]`` (`make bench-trace`); ends with a line of figures, and with 1 where one is beyond
its bound. Times are the least of the repetitions: a busy machine makes them longer, never shorter. Conversations are made up:
random token ids, and messages of as many words.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from evener.trace import CallRecord, Histories, build_graph, build_sequences, call_classes, find_forks
from evener.trace.prefix import HEADS_BYTES, HEADS_KEPT
from evener.trace.record import Base, Ids, encode

ROOT = Path(__file__).parents[1]
PLACES = (ROOT / ".out" / "bench-trace.json", ROOT / "bench" / "results" / "trace.json")
VOCABULARY = 150_000
BOUNDS = {"build_ms": 50.0, "bytes_per_turn": 6144.0, "row_ratio_8_turns": 5.0}
"""``row_ratio_8_turns`` is to be at least its bound, the others at most."""


def conversation(turns: int, *, prompt: int, sampled: int, results: int, broken: bool = False) -> list[CallRecord]:
    """Calls of one conversation: a first prompt, then in turn a reply and its results (in tokens).

    ``broken``: the history never comes back as it was sampled, so that no call's tokens go on from another's.
    """
    rng = np.random.default_rng(0)
    calls: list[CallRecord] = []
    history = rng.integers(0, VOCABULARY, prompt, dtype=np.int32)
    new: list[dict[str, Any]] = [{"role": "user", "content": _words(prompt // 4)}]
    for number in range(1, turns + 1):
        completion = rng.integers(0, VOCABULARY, sampled, dtype=np.int32)
        call = _call(number, history, completion, new)
        calls.append(call)
        echoed = rng.integers(0, VOCABULARY, sampled, dtype=np.int32) if broken else completion
        history = np.concatenate((history, echoed, rng.integers(0, VOCABULARY, results, dtype=np.int32)))
        new = [_turn(call.reply), {"role": "tool", "tool_call_id": f"call_{number}", "content": _words(results)}]
    return calls


def _call(number: int, prompt: Ids, completion: Ids, new: list[dict[str, Any]]) -> CallRecord:
    base = number - 1
    return CallRecord(
        call_id=f"01a22899-4263-752e-a9db-{number:012x}",
        session_id="01a22899-4263-752e-a9db-46e524203e52.1",
        number=number,
        prompt_ids=prompt,
        completion_ids=completion,
        logprobs=-np.random.default_rng(number).exponential(0.3, len(completion)).astype(np.float32),
        versions=np.full(len(completion), 7, np.int32),
        version_dispatch=7,
        version_completion=7,
        request={
            "system_digests": ["0" * 64],
            "tools_digest": "1" * 64,
            "messages": new,
            "messages_base": base,
            "messages_kept": 2 * base if base else 0,
            "asked": {"temperature": 0.2, "max_tokens": 32000},
            "used": {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 8192, "stop": None},
            "prompt": ({"from": base} if base else {"refused": "first"}) | {"messages": 2 * number, "history": "2" * 32},
        },
        reply={
            "id": f"{number:024x}",
            "created": 1_796_000_000,
            "content": _words(len(completion) // 4),
            "reasoning": None,
            "tool_calls": [
                {"id": f"call_{number}", "name": "bash", "arguments": json.dumps({"command": _words(len(completion) // 2)})}
            ],
            "finish_reason": "tool_calls",
            "stop_reason": None,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(completion),
        },
        dialect="chat",
        started=1_796_000_000.0,
        ended=1_796_000_001.0,
        delivered="yes",
        level="tokens",
        engine="http://127.0.0.1:8703",
    )


def _turn(reply: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
        for call in reply["tool_calls"]
    ]
    return {"role": "assistant", "content": reply["content"], "tool_calls": calls}


def _words(count: int) -> str:
    """A text of about ``count`` tokens."""
    return " ".join(["word"] * count)


def build(calls: Sequence[CallRecord]) -> int:
    """All that is done when a trace is archived, but for storing it; the number of tokens of its rows."""
    graph = build_graph(calls)
    histories = Histories(graph)
    classes = call_classes(graph, histories)
    find_forks(graph, histories, classes)
    return sum(len(row.input_ids) for row in build_sequences(graph, classes))


def least_ms(calls: list[CallRecord], repetitions: int) -> float:
    """The shortest time of building, the calls in any order."""
    times: list[float] = []
    for seed in range(repetitions):
        shuffled = random.Random(seed).sample(calls, len(calls))
        began = time.perf_counter()
        build(shuffled)
        times.append((time.perf_counter() - began) * 1000)
    return min(times)


def stored_bytes(calls: Sequence[CallRecord]) -> list[int]:
    """What each call takes in Redis: its record, a delta against the one before, and its head."""
    head = HEADS_BYTES // HEADS_KEPT
    sizes = [len(encode(calls[0])) + head]
    for above, call in pairwise(calls):
        sizes.append(len(encode(call, Base(above.number, len(above.tokens)))) + head)
    return sizes


def measure(repetitions: int) -> dict[str, Any]:
    """The figures, and what they were measured on."""
    line = conversation(60, prompt=1000, sampled=200, results=800)
    broken = conversation(60, prompt=1000, sampled=200, results=800, broken=True)
    first, *chained = stored_bytes(conversation(20, prompt=8000, sampled=256, results=100))
    _, *wordy = stored_bytes(conversation(20, prompt=8000, sampled=256, results=400))
    shape = {"prompt": 1400, "sampled": 100, "results": 200}  # pi's first prompt, and short turns
    eight, alone = conversation(8, **shape), conversation(8, **shape, broken=True)
    return {
        "build_ms": round(least_ms(line, repetitions), 2),
        "bytes_per_turn": round(sum(chained) / len(chained)),
        "row_ratio_8_turns": round(build(alone) / build(eight), 2),
        "build_broken_ms": round(least_ms(broken, max(1, repetitions // 4)), 2),
        "bytes_first_turn": first,
        "bytes_per_turn_400_results": round(sum(wordy) / len(wordy)),
        "measured": {
            "build": f"60 turns, {len(line[-1].tokens)} tokens; broken: no call's tokens go on from another's",
            "bytes": "8,000-token first prompt, 256-token replies, 100-token (400-token) results, 20 turns; without the first",
            "rows": "tokens of one row a call over the chain's: 1,400-token first prompt, 100-token replies, 200-token results",
        },
    }


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="bench.trace", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=20)
    result = measure(parser.parse_args().repetitions)
    missed = [name for name, bound in BOUNDS.items() if (result[name] < bound if "ratio" in name else result[name] > bound)]
    document = json.dumps(result | {"bounds": BOUNDS, "missed": missed}, indent=1)
    for place in PLACES:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(document + "\n")
    for name in missed:
        print(f"MISSED: {name} is {result[name]}, its bound {BOUNDS[name]}")
    print("bench-trace: " + " ".join(f"{name}={result[name]}" for name in BOUNDS))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
