"""The oracle: float32 log-probabilities of transformers, under the distribution that a token was drawn from."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np


def logprobs(folder: Path, prompt: Any, completion: Any, *, temperature: float = 1.0, top_k: int = -1) -> np.ndarray:
    """Log-probabilities of the completion's tokens [C], each given all tokens before it."""
    import torch

    ids = torch.tensor([[*map(int, prompt), *map(int, completion)]])
    with torch.no_grad():
        logits = _model(folder)(ids).logits[0, len(prompt) - 1 : -1] / temperature
    if top_k > 0:
        floor = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < floor, float("-inf"))
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].numpy()


def prompt_ids(folder: Path, messages: Any, tools: Any) -> list[int]:
    """A prompt as the policy's template and tokenizer make it."""
    tokenizer = _tokenizer(folder)
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False).input_ids


def text_of(folder: Path, ids: Any) -> str:
    """Tokens as text, special ones too."""
    return _tokenizer(folder).decode(list(map(int, ids)))


@lru_cache(maxsize=8)
def _model(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@lru_cache(maxsize=8)
def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
