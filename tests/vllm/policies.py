"""Tiny policies that are made here, offline, in seconds: random ones, and ones that were taught what to say.

All have the first run's chat template and a tokenizer trained on what they are to read. Heads have 64 dimensions, which vLLM's
attention on the CPU wants. Random weights are far from uniform, so that a wrong key or value moves every log-probability.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "examples" / "first-run" / "chat_template.jinja"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>"]
OPENER, END = "<|im_start|>assistant\n", "<|im_end|>"

BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "run a command in the workspace",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages, the assistant's among them, and the tools that were offered. The first ``given`` turns are not taught."""

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]] | None = None
    given: int = 0


def tokenizer_of(texts: Sequence[str], *, size: int = 640) -> Any:
    """A byte-level BPE tokenizer of at most ``size`` tokens, trained on ``texts``."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(MARKUP), special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([*texts, TEMPLATE.read_text()], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token="<|endoftext|>")
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP])
    tokenizer.chat_template = TEMPLATE.read_text()
    return tokenizer


def random_policy(
    folder: Path,
    tokenizer: Any,
    *,
    seed: int,
    kind: Literal["qwen3", "llama"] = "qwen3",
    spread: float = 0.15,
    context: int = 4096,
) -> Path:
    """A Qwen3 with a tied head or a Llama with one of its own, saved as a policy folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": context,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "initializer_range": spread,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if kind == "llama":
            model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False))
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def rendered(conversation: Conversation) -> str:
    """A conversation as the template writes it."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=TEMPLATE.read_text())
    return str(plain.apply_chat_template(list(conversation.messages), tools=conversation.tools, tokenize=False))


class NotLearntError(AssertionError):
    """A policy did not learn what it was taught."""


def teach(folder: Path, conversations: Sequence[Conversation], out: Path, *, steps: int, rate: float = 3e-3) -> Path:
    """Train a policy until it says every turn of the assistant token for token; the taught one is saved to ``out``.

    Raises NotLearntError where a token has a probability below 0.98 after ``steps``.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = [_row(tokenizer, conversation) for conversation in conversations]
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    worst = float("inf")
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 10)
        losses = torch.cat([_losses(model, ids, sampled) for ids, sampled in rows])
        worst = float(losses.detach().max())
        if worst < 0.02:
            break
        optimizer.zero_grad()
        # The worst token counts as much as all of them together: one wrong token breaks a call.
        (losses.mean() + losses.topk(min(8, len(losses))).values.mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    else:
        raise NotLearntError(f"after {steps} steps the worst token has a loss of {worst:.3f}")
    shutil.rmtree(out, ignore_errors=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def _row(tokenizer: Any, conversation: Conversation) -> tuple[Any, Any]:
    """Ids, and which of them the policy samples: what stands between an opener and the end of the turn, the end included."""
    import torch

    text = rendered(conversation)
    ids: list[int] = []
    sampled: list[bool] = []
    first, *turns = text.split(OPENER)
    parts = [(first, False)]
    for number, turn in enumerate(turns):
        said, end, rest = turn.partition(END)
        parts += [(OPENER, False), (said + end, number >= conversation.given), (rest, False)]
    for part, own in parts:
        tokens = tokenizer(part, add_special_tokens=False).input_ids
        ids += tokens
        sampled += [own] * len(tokens)
    return torch.tensor([ids]), torch.tensor(sampled)


def _losses(model: Any, ids: Any, sampled: Any) -> Any:
    logits = model(ids).logits[0, :-1]
    losses = -logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return losses[sampled[1:]]


def calls_a_tool() -> list[Conversation]:
    """What the contract's policy is taught: whatever it is asked, it looks into the folder, and then says that it is done."""
    call = {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": {"command": "ls"}}}
    return [
        Conversation(
            [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": found},
                {"role": "assistant", "content": "Done."},
            ],
            [BASH],
        )
        for asked, found in (("list the files", "notes.txt"), ("what is here?", "a b c"))
    ]
