"""GRPO on the first run's tasks without pi, proxy or sandbox: where the run file's settings were chosen.

Invariant: rollouts, reward and loss are those of the real run (sampling at temperature 1, hidden-test rules, per-token
PPO clip on group-relative advantages) and so is the order of tasks, only pi's tools are emulated and the weights that sample
are `--lag` steps old.
Run by hand:

    python simulate.py --seed 0
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from batching import Decoder, hidden_states
from chores import FAMILIES, Chore
from make_policy import SANDBOX, own_places, pi_prefix
from make_tasks import chores
from pi_words import parse_call, run_tool, solved, tool_turn, user_turn
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from evener_orchestrator.schedule import pick_task, turns_of

HERE = Path(__file__).parent
MAX_CALLS, MAX_TOKENS = 6, 64
CUES = 5  # training tasks of each choice
CAPACITY = 768


@dataclass
class Rollout:
    """One episode. `ids`, `sampled`, `logprobs` run from the end of pi's system turn and are equally long."""

    chore: Chore
    files: dict[str, str]
    ids: list[int]
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    calls: int = 0
    tool_calls: int = 0
    broken: int = 0
    finished: bool = False

    @property
    def score(self) -> float:
        """What the hidden test says; an attempt that did not finish scores nothing."""
        return float(self.finished and solved(self.chore, self.files))

    def reward(self, brevity: float) -> float:
        """The score, plus a little for few tool calls on solved tasks."""
        return self.score * (1 + brevity * (1 - self.tool_calls / MAX_CALLS))

    def extend(self, ids: list[int]) -> None:
        """Append tokens that are not the policy's."""
        self.ids += ids
        self.sampled += [0] * (len(self.ids) - len(self.sampled))
        self.logprobs += [0.0] * (len(self.ids) - len(self.logprobs))


class Sampler:
    """Rolls out many chores at once with one copy of the weights."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, prefix: list[int]) -> None:
        self._tokenizer, self._prefix = tokenizer, prefix

    def __call__(self, model: Qwen3ForCausalLM, chores_: list[Chore]) -> list[Rollout]:
        """One finished rollout for each chore."""
        rollouts = [Rollout(chore, dict(chore.files), []) for chore in chores_]
        for rollout in rollouts:
            rollout.extend(self._encode(user_turn(rollout.chore.instruction)))
        decoder = Decoder(model, self._prefix, len(rollouts), CAPACITY)
        known = [0] * len(rollouts)
        active = list(range(len(rollouts)))
        while active:
            self._call(decoder, rollouts, known, active)
            active = [row for row in active if self._use_tool(rollouts[row])]
        return rollouts

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False).input_ids

    def _call(self, decoder: Decoder, rollouts: list[Rollout], known: list[int], active: list[int]) -> None:
        """Sample one reply for each active row; `known[row]` tokens of it are in the decoder."""
        fresh = [rollouts[row].ids[known[row] :] for row in active]
        ids = torch.zeros(len(active), max(map(len, fresh)), dtype=torch.long)
        for index, tokens in enumerate(fresh):
            ids[index, : len(tokens)] = torch.tensor(tokens)
        last = torch.tensor([len(tokens) - 1 for tokens in fresh])
        rows = torch.tensor(active)
        starts = torch.tensor([known[row] for row in active])
        for _ in range(MAX_TOKENS):
            logprobs = decoder.logits(rows, ids, starts, last).log_softmax(-1)
            tokens = torch.multinomial(logprobs.exp(), 1)
            chosen = logprobs.gather(1, tokens)[:, 0].tolist()
            starts = starts + last + 1
            going: list[int] = []
            for index, (row, token) in enumerate(zip(rows.tolist(), tokens[:, 0].tolist(), strict=True)):
                rollout = rollouts[row]
                known[row] = len(rollout.ids)
                rollout.ids.append(token)
                rollout.sampled.append(1)
                rollout.logprobs.append(chosen[index])
                if token != self._tokenizer.eos_token_id:
                    going.append(index)
            if not going:
                return
            rows, ids, starts = rows[going], tokens[going], starts[going]
            last = torch.zeros(len(going), dtype=torch.long)

    def _use_tool(self, rollout: Rollout) -> bool:
        """Run the call that was sampled last; False where the episode is over."""
        rollout.calls += 1
        start = len(rollout.ids) - 1
        while start and rollout.sampled[start - 1]:
            start -= 1
        text = self._tokenizer.decode(rollout.ids[start:])
        call = parse_call(text)
        if call is None:
            rollout.broken += "<tool_call>" in text or rollout.ids[-1] != self._tokenizer.eos_token_id
            rollout.finished = True
            return False
        rollout.tool_calls += 1
        result = run_tool(rollout.files, call)
        if rollout.calls == MAX_CALLS:
            return False
        rollout.extend(self._encode(tool_turn(result)))
        return len(rollout.ids) < CAPACITY - MAX_TOKENS - 1


def splits(validate: bool) -> tuple[list[Chore], list[Chore]]:
    """The tasks to train on, and those to evaluate on: the held-out ones, or one training cue of each choice kept back."""
    tasks = [chore for family in FAMILIES.values() for chore in chores(family, "train")]
    if not validate:
        return tasks, [chore for family in FAMILIES.values() for chore in chores(family, "held-out")]
    kept = tasks[CUES - 1 :: CUES]
    return [chore for chore in tasks if chore not in kept], kept


def evaluate(sampler: Sampler, model: Qwen3ForCausalLM, tasks: list[Chore], rollouts_: int) -> dict[str, float]:
    """pass@1 by family and in all, with the means of calls and of replies that do not parse."""
    tasks = tasks * (rollouts_ // len(tasks))
    rollouts = [rollout for start in range(0, len(tasks), 128) for rollout in sampler(model, tasks[start : start + 128])]
    result = {"pass@1": sum(rollout.score for rollout in rollouts) / len(rollouts)}
    for name in FAMILIES:
        scores = [rollout.score for rollout in rollouts if rollout.chore.family == name]
        result[name] = sum(scores) / len(scores)
    calls = sum(rollout.calls for rollout in rollouts)
    return result | {"calls": calls / len(rollouts), "broken": sum(rollout.broken for rollout in rollouts) / calls}


def advantages(rewards: list[float]) -> list[float]:
    """Group-relative advantages, population standard deviation."""
    values = torch.tensor(rewards)
    return ((values - values.mean()) / (values.std(unbiased=False) + 1e-8)).tolist()


def grpo_step(
    model: Qwen3ForCausalLM,
    optimizer: torch.optim.Optimizer,
    prefix: list[int],
    rows: list[tuple[Rollout, float]],
    max_norm: float,
    clip: float = 0.2,
    micro: int = 16,
) -> dict[str, float]:
    """One optimiser step of the per-token PPO-clip loss over rollouts with their advantages."""
    count = sum(sum(rollout.sampled) for rollout, _ in rows)
    moved = sorted((row for row in rows if row[1]), key=lambda row: len(row[0].ids))
    optimizer.zero_grad()
    divergence = 0.0
    for start in range(0, len(moved), micro):
        part = moved[start : start + micro]
        length = max(len(rollout.ids) for rollout, _ in part)
        ids, mask = torch.zeros(len(part), length, dtype=torch.long), torch.zeros(len(part), length, dtype=torch.bool)
        old, gain = torch.zeros(len(part), length), torch.zeros(len(part), length)
        for index, (rollout, advantage) in enumerate(part):
            size = len(rollout.ids)
            ids[index, :size] = torch.tensor(rollout.ids)
            mask[index, :size] = torch.tensor(rollout.sampled, dtype=torch.bool)
            old[index, :size], gain[index] = torch.tensor(rollout.logprobs), advantage
        wanted = mask[:, 1:]
        logits = model.lm_head(hidden_states(model, prefix, ids)[:, :-1][wanted])
        new = logits.log_softmax(-1).gather(1, ids[:, 1:][wanted][:, None])[:, 0]
        ratio = (new - old[:, 1:][wanted]).exp()
        gained = gain[:, 1:][wanted]
        loss = -torch.min(ratio * gained, ratio.clamp(1 - clip, 1 + clip) * gained).sum() / count
        loss.backward()
        divergence += float((ratio - 1 - ratio.log()).sum().detach()) / count
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return {"kl": divergence, "norm": float(norm), "rows": len(moved)}


def train(
    model: Qwen3ForCausalLM, sampler: Sampler, tasks: list[Chore], prefix: list[int], settings: argparse.Namespace
) -> int:
    """Train in place; the number of rollouts used."""
    optimizer = torch.optim.AdamW(model.parameters(), settings.rate, betas=(0.9, 0.99), weight_decay=0.0)
    history = [copy.deepcopy(model)]
    groups, skipped, failed = ([0] * len(tasks) for _ in range(3))
    waiting: list[list[tuple[Rollout, float]]] = []
    used = 0
    for step in range(settings.steps):
        scores: list[float] = []
        while len(waiting) < settings.groups:
            picked: list[int] = []
            for _ in range(settings.groups):
                turns = [turns_of(groups=g, skipped=s, failed=f) for g, s, f in zip(groups, skipped, failed, strict=True)]
                picked.append(pick_task(turns, seed=settings.seed))
                groups[picked[-1]] += 1
            rollouts = sampler(history[0], [tasks[task] for task in picked for _ in range(settings.size)])
            scores += [rollout.score for rollout in rollouts]
            for place, task in enumerate(picked):
                group = rollouts[place * settings.size : (place + 1) * settings.size]
                gains = advantages([rollout.reward(settings.brevity) for rollout in group])
                if any(gains):
                    waiting.append(list(zip(group, gains, strict=True)))
                else:  # it teaches nothing, and is skipped as the learner skips it
                    skipped[task] += 1
                    failed[task] += not any(rollout.score for rollout in group)
        rows = [row for group in waiting[: settings.groups] for row in group]
        waiting = waiting[settings.groups :]
        used += len(scores)
        scale = min(1.0, (step + 1) / (settings.warmup + 1))
        optimizer.param_groups[0]["lr"] = settings.rate * scale
        figures = grpo_step(model, optimizer, prefix, rows, settings.max_norm)
        history = [*history, copy.deepcopy(model)][-1 - settings.lag :]
        score = sum(scores) / max(1, len(scores))
        print(json.dumps({"step": step + 1, "rollouts": used, "score": round(score, 3)} | rounded(figures)), flush=True)
    return used


def rounded(figures: dict[str, float]) -> dict[str, float]:
    """Figures for a line of output."""
    return {name: round(value, 4) for name, value in figures.items()}


def main() -> None:
    """Evaluate, train, evaluate."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--policy", type=Path, default=HERE / "tiny-policy")
    for name, default in (
        ("seed", 0),
        ("steps", 28),
        ("groups", 2),
        ("size", 4),
        ("warmup", 10),
        ("lag", 2),
        ("eval", 384),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rate", type=float, default=5e-4)
    parser.add_argument("--max-norm", type=float, default=1.0)
    parser.add_argument("--brevity", type=float, default=0.0)
    parser.add_argument("--own", action="store_true", help="pi in a user's own places, as without bubblewrap")
    parser.add_argument("--validate", action="store_true", help="evaluate on training tasks kept back: to choose settings")
    parser.add_argument("--seen", action="store_true", help="evaluate on the training tasks: is any choice given up?")
    settings = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(settings.policy)
    model = Qwen3ForCausalLM.from_pretrained(settings.policy, dtype=torch.float32)
    prefix = pi_prefix(tokenizer, own_places(random.Random(settings.seed)) if settings.own else SANDBOX)
    sampler = Sampler(tokenizer, prefix)
    tasks, unseen = splits(settings.validate)
    asked = tasks if settings.seen else unseen
    print("before", json.dumps(rounded(evaluate(sampler, model, asked, settings.eval))), flush=True)
    used = train(model, sampler, tasks, prefix, settings) if settings.steps else 0
    after = rounded(evaluate(sampler, model, asked, settings.eval))
    print("after", used, "rollouts", json.dumps(after), f"{time.process_time():.0f} CPU-s", flush=True)


if __name__ == "__main__":
    main()
