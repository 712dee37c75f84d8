"""The oracle: transformers' float32 log-probabilities of what the engine sampled, per version span."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def span_logprobs(folder: Path, ids: list[int], temperature: float = 1.0) -> list[float]:
    """Log-probability of each of `ids[1:]` given those before it."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def worst_difference(reply: dict[str, Any], versions: dict[str, Path], temperature: float = 1.0) -> float:
    """Largest difference between the reply's log-probabilities and the oracle's; checks the reply's own lengths."""
    (choice,) = reply["choices"]
    prompt, tokens = reply["prompt_token_ids"], choice["token_ids"]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    spans = choice["weight_versions"]
    assert len(logprobs) == len(tokens) == reply["usage"]["completion_tokens"] == spans[-1]["end"]
    assert len(prompt) == reply["usage"]["prompt_tokens"]
    assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
    assert all(-1e9 < logprob <= 0 for logprob in logprobs)
    worst = 0.0
    for span in spans:
        scored = span_logprobs(versions[span["version"]], prompt + tokens, temperature)
        for i in range(span["start"], span["end"]):
            worst = max(worst, abs(scored[len(prompt) + i - 1] - logprobs[i]))
    return worst
