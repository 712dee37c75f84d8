"""Build the tiny policy: its tokenizer, then a warm start on synthetic transcripts in pi's own format.

Invariant: the policy calls pi's tools correctly and ends its turn, it can say what a cue means when it is asked
outright (quiz), but in front of pi its choice barely follows the instruction (CAREFUL, against chance 0.25): acting on
what it knows is left to reinforcement learning. Run by hand:

    python make_policy.py [--out tiny-policy]

Same seed, same machine, same weights; every graded instruction stays unseen (chores.py).
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from pathlib import Path
from typing import NamedTuple

import torch
from batching import hidden_states
from chores import FAMILIES, Chore, Family, draw
from muon import Muon
from pi_words import END, RECORDED, Call, run_tool, tool_turn, user_turn
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
SPECIAL = ["<|endoftext|>", "<|im_start|>", END]
MARKUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>"]
SCHEMA = [
    '{"type": "function", "function": {"name": "',
    '", "parameters": {"type": "object", "required": ["',
    '"], "properties": {"',
    '": {"type": "string", "description": "',
    '": {"type": "number", "description": "',
    '", "description": "',
]
FINAL = ("Done.", "All done.", "It is done.")
LEARN, FADE = 450, 200  # steps that teach the right choices, and steps in which they fade to CAREFUL
CAREFUL = 0.32  # how often the warm start's choice is the right one in the end; chance is 0.25
JOLT = 5e-3  # how far each weight may move before a tool call breaks
READS = (0.8, 0.85)  # how often it reads the ticket before it writes: while it learns, and in the end
LOOKS = 0.15  # how often it looks at the result before it ends
BATCH, POOL = 16, 8  # transcripts a step, and batches that are drawn together to be sorted by length


class Places(NamedTuple):
    """What pi's prompt says of where it is: its own folder, and the working directory."""

    pi: str
    cwd: str


SANDBOX = Places("/opt/evener/pi", "/workspace")
OWN_DOCS = ("/.cache/evener/harnesses/pi-", "/lib/node_modules/@earendil-works/pi-coding-agent/")
OWN_CWD = ("/evener-", "/workspace")


class Segment(NamedTuple):
    """A piece of a transcript: its text, whether the policy samples it, and where it makes a choice the options.

    The first option is the right one; options are one token each.
    """

    text: str
    sampled: bool
    options: tuple[str, ...] = ()
    careful: float = 1.0


class Row(NamedTuple):
    """A transcript as ids and labels (-100 where nothing is sampled, or where a choice is made), and its choices.

    A choice is (position of its token, ids of the options, their target probabilities).
    """

    ids: list[int]
    labels: list[int]
    choices: list[tuple[int, list[int], list[float]]]


def phrases() -> list[str]:
    """The clauses of pi's prompt, each of which becomes one token: a tiny policy pays for every position."""
    texts = [RECORDED["system"]]

    def descriptions(value: object) -> None:
        if isinstance(value, dict):
            texts.extend(text for key, text in value.items() if key == "description" and isinstance(text, str))
            for inner in value.values():
                descriptions(inner)
        elif isinstance(value, list):
            for inner in value:
                descriptions(inner)

    descriptions(RECORDED["tools"])
    texts += [*OWN_DOCS, *OWN_CWD]
    clauses = {clause for text in texts for line in text.split("\n") for clause in re.split(r"(?<=[.;:,)])(?= )", line)}
    return sorted(clause for clause in clauses if len(clause) >= 10) + SCHEMA


def make_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of `size` pieces over the chores and pi's words, with digits split, and pi's clauses whole."""
    bpe = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    rng = random.Random(1)
    corpus = [json.dumps(RECORDED["tools"]), RECORDED["system"]] * 30
    for _ in range(6000):
        family = rng.choice(list(FAMILIES.values()))
        corpus.append("".join(part.text for part in transcript(rng, draw(rng, family, "warm"), CAREFUL, READS[0])))
        corpus.append("".join(part.text for part in quiz(rng, family)))
    for part in [*SPECIAL, *MARKUP, *phrases()]:
        corpus = [text.replace(part, "\n") for text in corpus]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(corpus, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END, pad_token=SPECIAL[0], clean_up_tokenization_spaces=False
    )
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in [*MARKUP, *phrases()]])
    tokenizer.model_max_length = 4096
    tokenizer.chat_template = (HERE / "chat_template.jinja").read_text()
    return tokenizer


def pi_prefix(tokenizer: PreTrainedTokenizerFast, places: Places = SANDBOX) -> list[int]:
    """Token ids of pi's system turn, which every rollout starts with."""
    told = RECORDED["system"].replace(f"{SANDBOX.pi}/", f"{places.pi}/").replace(f"\n{SANDBOX.cwd}\n", f"\n{places.cwd}\n")
    text = tokenizer.apply_chat_template([{"role": "system", "content": told}], tools=RECORDED["tools"], tokenize=False)
    return tokenizer(text, add_special_tokens=False).input_ids


def own_places(rng: random.Random) -> Places:
    """Where pi is and works on a machine without bubblewrap: below the user's home, and in a temporary folder."""
    name = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) + rng.choice(("", "", "1", "42"))
    home = rng.choice(("/root", f"/home/{name}", f"/home/{name}", f"/home/{name}", f"/srv/{name}"))
    version = f"1.{rng.randint(6, 12)}.{rng.randint(0, 9)}"
    random_part = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz0123456789_", k=8))
    return Places(f"{home}{OWN_DOCS[0]}{version}", f"/tmp{OWN_CWD[0]}{random_part}{OWN_CWD[1]}")


def prefix_of(rng: random.Random, tokenizer: PreTrainedTokenizerFast, usual: list[int]) -> list[int]:
    """pi's system turn as a rollout may start with it: as often in the sandbox's places (`usual`) as in a user's own."""
    return usual if rng.random() < 0.5 else pi_prefix(tokenizer, own_places(rng))


def action(family: str, choice: str) -> Call:
    """The call that makes `choice`."""
    if family == "log-level":
        return Call("write", {"path": "log_level", "content": choice})
    if family == "note":
        return Call("bash", {"command": f"mv inbox/note.txt {choice}"})
    if family == "backup":
        return Call("edit", {"path": "backup.conf", "edits": [{"oldText": "day", "newText": choice}]})
    return Call("write", {"path": "team.txt", "content": choice})


def choosing(family: str, chore: Chore, chosen: str, careful: float) -> list[Segment]:
    """The call that makes the choice `chosen`, to be learnt as `careful` for the right choice and the rest shared."""
    before, after = (action(family, "\0").text() + END).split(json.dumps("\0")[1:-1])
    space = " " if before.endswith(" ") else ""
    others = [choice for choice in FAMILIES[family].choices if choice != chore.choice]
    options = tuple(space + choice for choice in (chore.choice, *others))
    head = Segment(before.removesuffix(" "), True)
    return [head, Segment(space + chosen, True, options, careful), Segment(after, True)]


def transcript(rng: random.Random, chore: Chore, careful: float, reads: float) -> list[Segment]:
    """How the warm start behaves on a chore: well-formed, short, and right as often as `careful` says.

    What it chooses in the text is random, so that what follows is learnt after every choice.
    """
    files = dict(chore.files)
    segments = [Segment(user_turn(chore.instruction), False)]

    def answer(call: Call, parts: list[Segment]) -> None:
        segments.extend([*parts, Segment(tool_turn(run_tool(files, call)), False)])

    def plain(call: Call) -> None:
        answer(call, [Segment(call.text() + END, True)])

    if chore.family == "ticket":
        if rng.random() < reads:
            plain(Call("read", {"path": "ticket.txt"}))
        else:
            careful = 0.25
    chosen = rng.choice(FAMILIES[chore.family].choices)
    call = action(chore.family, chosen)
    answer(call, choosing(chore.family, chore, chosen, careful))
    if rng.random() < LOOKS:
        target = call.arguments.get("path")
        plain(Call("read", {"path": target}) if target else Call("bash", {"command": "ls inbox"}))
    return [*segments, Segment(rng.choice(FINAL) + END, True)]


def quiz(rng: random.Random, family: Family) -> list[Segment]:
    """A question about one cue, and its answer: the warm start's knowledge, apart from any tool."""
    choice = rng.choice(family.choices)
    question = family.question.format(cue=rng.choice(family.cues[choice][rng.randrange(2)]))
    return [Segment(user_turn(question), False), Segment(choice + END, True)]


def encode(tokenizer: PreTrainedTokenizerFast, rows: list[list[Segment]]) -> list[Row]:
    """Ids, labels and choices of each row."""
    stream = iter(tokenizer([segment.text for row in rows for segment in row], add_special_tokens=False).input_ids)
    encoded: list[Row] = []
    for row in rows:
        ids: list[int] = []
        labels: list[int] = []
        choices: list[tuple[int, list[int], list[float]]] = []
        for segment in row:
            piece = next(stream)
            if segment.options:
                rest = (1 - segment.careful) / (len(segment.options) - 1)
                targets = [segment.careful] + [rest] * (len(segment.options) - 1)
                choices.append((len(ids), tokenizer.convert_tokens_to_ids(pieces_of(tokenizer, segment)), targets))
            labels += piece if segment.sampled and not segment.options else [-100] * len(piece)
            ids += piece
        encoded.append(Row(ids, labels, choices))
    return encoded


def pieces_of(tokenizer: PreTrainedTokenizerFast, segment: Segment) -> list[str]:
    """The one token of each option."""
    return [tokenizer.tokenize(option)[0] for option in segment.options]


def pad(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids and next-token labels, both (rows, length)."""
    length = max(len(row.ids) for row in rows)
    x, y = torch.zeros(len(rows), length, dtype=torch.long), torch.full((len(rows), length), -100)
    for index, row in enumerate(rows):
        x[index, : len(row.ids)] = torch.tensor(row.ids)
        y[index, : len(row.ids) - 1] = torch.tensor(row.labels[1:])
    return x, y


def loss_of(model: Qwen3ForCausalLM, prefix: list[int], rows: list[Row]) -> torch.Tensor:
    """Mean cross-entropy of what is sampled; where a choice is made, against its target probabilities."""
    x, y = pad(rows)
    hidden = hidden_states(model, prefix, x)
    wanted = y != -100
    total = functional.cross_entropy(model.lm_head(hidden[wanted]), y[wanted], reduction="sum")
    logprobs, targets = choices_of(model, hidden, rows)
    return (total - (logprobs * targets).sum()) / (wanted.sum() + len(targets))


def choices_of(model: Qwen3ForCausalLM, hidden: torch.Tensor, rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and targets of the options of every choice in `rows`, (choices, 4), the right one first."""
    choices = [(index, *choice) for index, row in enumerate(rows) for choice in row.choices]
    if not choices:
        return torch.zeros(0, 4), torch.zeros(0, 4)
    index, position, options, targets = (torch.tensor(column) for column in zip(*choices, strict=True))
    return model.lm_head(hidden[index, position - 1]).log_softmax(-1).gather(1, options), targets


def sturdy_backward(model: Qwen3ForCausalLM, prefix: list[int], rows: list[Row], jolt: float) -> float:
    """Add the gradients of a batch, and of its text under weights that were moved as learning moves them; returns the loss.

    They are moved by `jolt` in the direction that changes the choices (the sign of the gradient, which is how AdamW steps
    at first). Without it so small a policy breaks its tool calls within ten steps of learning to choose.
    """
    x, y = pad(rows)
    weights = list(model.parameters())
    hidden = hidden_states(model, prefix, x)
    text = text_loss(model, hidden, y)
    logprobs, targets = choices_of(model, hidden, rows)
    tokens = int((y != -100).sum())
    loss = (text * tokens - (logprobs * targets).sum()) / (tokens + len(targets))
    advantages = torch.randn(logprobs.shape) + torch.tensor([1.0, -0.5, -0.5, -0.5])
    expected = (logprobs * advantages * logprobs.detach().exp()).sum()
    directions = [gradient.sign() for gradient in torch.autograd.grad(expected, weights, retain_graph=True)]
    loss.backward()
    move(weights, directions, jolt)
    text_loss(model, hidden_states(model, prefix, x), y).backward()
    move(weights, directions, -jolt)
    return loss.item()


def text_loss(model: Qwen3ForCausalLM, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of what is sampled, without the choices."""
    wanted = labels != -100
    return functional.cross_entropy(model.lm_head(hidden[wanted]), labels[wanted])


@torch.no_grad()
def move(weights: list[torch.nn.Parameter], directions: list[torch.Tensor], size: float) -> None:
    """Add `size` times its direction to each weight."""
    for weight, direction in zip(weights, directions, strict=True):
        weight.add_(direction, alpha=size)


def pool(rng: random.Random, tokenizer: PreTrainedTokenizerFast, careful: float, reads: float) -> list[list[Row]]:
    """`POOL` batches of fresh transcripts, each of about the same length, the shortest first."""
    families = list(FAMILIES.values())
    drawn = [draw(rng, rng.choice(families), "warm") for _ in range(POOL * BATCH)]
    rows = encode(tokenizer, [transcript(rng, chore, careful, reads) for chore in drawn])
    rows.sort(key=lambda row: len(row.ids))
    return [rows[start : start + BATCH] for start in range(0, len(rows), BATCH)]


def optimizers(model: Qwen3ForCausalLM, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for embeddings and norms: a third of the steps that AdamW alone needs."""
    named = list(model.named_parameters())
    matrices = [weight for name, weight in named if weight.dim() == 2 and "embed" not in name]
    rest = [weight for name, weight in named if weight.dim() != 2 or "embed" in name]
    return [Muon(matrices, lr=rate), torch.optim.AdamW(rest, lr=0.15 * rate, betas=(0.9, 0.98), weight_decay=0.0)]


class Optimizers:
    """Both optimisers with their schedule: up over `warmup` steps, then full, and down over the last two thirds."""

    def __init__(self, model: Qwen3ForCausalLM, rate: float, steps: int, warmup: int) -> None:
        self._model, self._steps, self._warmup = model, steps, warmup
        self._all = optimizers(model, rate)
        self._rates = [optimizer.param_groups[0]["lr"] for optimizer in self._all]

    def begin(self, step: int) -> None:
        """Set the rates of `step` and clear the gradients."""
        scale = min(1.0, (step + 1) / self._warmup, 1.5 * (1 - step / self._steps))
        for optimizer, full in zip(self._all, self._rates, strict=True):
            optimizer.param_groups[0]["lr"] = full * scale
            optimizer.zero_grad()

    def step(self) -> None:
        """Move the weights."""
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        for optimizer in self._all:
            optimizer.step()


def piece_of(rng: random.Random, prefix: list[int]) -> list[int]:
    """A random piece of pi's prompt: cheaper than the whole, and it teaches to act whatever precedes the instruction."""
    start = rng.randrange(len(prefix) - 1)
    return prefix[start : start + rng.randint(0, 40)]


def quizzes(rng: random.Random, tokenizer: PreTrainedTokenizerFast, count: int) -> list[Row]:
    """Questions about cues."""
    families = list(FAMILIES.values())
    return encode(tokenizer, [quiz(rng, rng.choice(families)) for _ in range(count)])


def learn(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> None:
    """Teach the tools and the right choices, one step in five after the whole of pi's prompt."""
    prefix = pi_prefix(tokenizer)
    optimizers_ = Optimizers(model, 0.02, LEARN, warmup=30)
    waiting: list[list[Row]] = []
    for step in range(LEARN):
        piece = prefix_of(rng, tokenizer, prefix) if rng.random() < 0.2 else piece_of(rng, prefix)
        optimizers_.begin(step)
        asked = loss_of(model, [], quizzes(rng, tokenizer, 32))
        if not waiting:
            fresh = pool(rng, tokenizer, 1.0, READS[0])
            waiting = [fresh[index] for index in rng.sample(range(POOL), POOL)]
        (0.3 * asked).backward()
        told = loss_of(model, piece, waiting.pop(0))
        told.backward()
        optimizers_.step()
        report("learn", step, LEARN, asked.item(), told.item())


def fade(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> None:
    """Let the choices fade to CAREFUL after the whole of pi's prompt, and stay right after pieces of it.

    So what is known stays known, and in the end only pi's prompt keeps it from being used: one thing to unlearn for all
    families, where choices that are unsure everywhere would have to be learnt anew.
    """
    prefix = pi_prefix(tokenizer)
    optimizers_ = Optimizers(model, 0.003, FADE, warmup=20)
    after_whole: list[list[Row]] = []
    after_pieces: list[list[Row]] = []
    for step in range(FADE):
        whole = rng.random() < 0.6
        careful = max(CAREFUL, 1 - (1 - CAREFUL) * step / (0.5 * FADE)) if whole else 1.0
        piece = prefix_of(rng, tokenizer, prefix) if whole else piece_of(rng, prefix)
        waiting = after_whole if whole else after_pieces
        if not waiting:
            waiting += pool(rng, tokenizer, careful, READS[1])
            rng.shuffle(waiting)
        optimizers_.begin(step)
        asked = loss_of(model, [], quizzes(rng, tokenizer, 24))
        (0.3 * asked).backward()
        told = sturdy_backward(model, piece, waiting.pop(), JOLT * rng.random())
        optimizers_.step()
        report("fade", step, FADE, asked.item(), told)


@torch.no_grad()
def right_choices(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> dict[str, float]:
    """How probable the right choice is after the whole of pi's prompt, by family: a family that is not learnt shows here."""
    found: dict[str, float] = {}
    for family in FAMILIES.values():
        rows = encode(tokenizer, [transcript(rng, draw(rng, family, "warm"), 1.0, 1.0) for _ in range(48)])
        hidden = hidden_states(model, pi_prefix(tokenizer, own_places(rng)), pad(rows)[0])
        found[family.name] = round(choices_of(model, hidden, rows)[0][:, 0].exp().mean().item(), 2)
    return found


def report(phase: str, step: int, steps: int, asked: float, told: float) -> None:
    """A line every twenty steps."""
    if step % 20 == 19:
        losses = f"quiz {asked:.4f} transcript {told:.4f}"
        print(f"{phase} {step + 1}/{steps} {losses} cpu {time.process_time():.0f} s", flush=True)


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the Hugging Face folder, in float32."""
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.do_sample = True
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    """Build and save the policy."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=HERE / "tiny-policy")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pieces", type=int, default=1280)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # faster than two where the cores are shared, and the sums are the same everywhere
    torch.manual_seed(arguments.seed)
    tokenizer = make_tokenizer(arguments.pieces)
    for family in FAMILIES.values():
        texts = [action(family.name, choice).text() for choice in family.choices]
        assert len({len(ids) for ids in tokenizer(texts).input_ids}) == 1, f"{family.name}: a choice is not one token"
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=arguments.width,
        intermediate_size=3 * arguments.width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=arguments.width // 4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    weights = sum(weight.numel() for weight in model.parameters())
    print(f"{weights / 1e6:.2f} M weights, vocabulary {len(tokenizer)}, pi's prompt {len(pi_prefix(tokenizer))} tokens")
    learn(model, tokenizer, random.Random(arguments.seed))
    print("learnt", right_choices(model, tokenizer, random.Random(arguments.seed)), flush=True)
    torch.manual_seed(arguments.seed)
    fade(model, tokenizer, random.Random(arguments.seed + 1))
    print("faded", right_choices(model, tokenizer, random.Random(arguments.seed)), flush=True)
    save(model.eval(), tokenizer, arguments.out)


if __name__ == "__main__":
    main()
