"""What the learner relies on in TRL: one optimizer step on exactly the given rows, with the loss of the oracle below."""

import math
from pathlib import Path

import numpy as np
import pytest

from evener.errors import InfraError
from evener_learner.admission import Group, Row
from evener_learner.steps import Assembly
from evener_learner.worker import StepResult, TrainerThread
from tests.unit.learner.making import VOCABULARY, group, pair, rollout, sequence, tiny_policy

pytestmark = pytest.mark.torch
RATE = 1e-3


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy"))


def options(policy: Path, folder: Path, **changes):
    from evener_learner.trainer import TrainOptions

    values = {
        "policy": policy,
        "folder": folder,
        "checkpoint": None,
        "learning_rate": RATE,
        "warmup_steps": 0,
        "temperature": 1.0,
        "seed": 0,
    }
    return TrainOptions(**(values | changes))


async def train(steps: list[list[Row]], policy: Path, folder: Path, **changes) -> list[StepResult]:
    from evener_learner.trainer import run

    async with TrainerThread(lambda feed: run(options(policy, folder, **changes), feed)) as trainer:
        return [await trainer.train(rows) for rows in steps]


def oracle(policy: Path, rows: list[Row], temperature: float = 1.0):
    """GRPO with a per-token clip of 0.2, the mean over all trained tokens: padded rows, no TRL, no packing."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    size = (len(rows), max(row.ids.size for row in rows))
    ids, attention, mask, old = (torch.zeros(size, dtype=kind) for kind in (torch.long, torch.long, torch.float, torch.float))
    for index, row in enumerate(rows):
        ids[index, : row.ids.size] = torch.as_tensor(row.ids)
        attention[index, : row.ids.size] = 1
        mask[index, : row.ids.size] = torch.as_tensor(row.mask).float()
        old[index, : row.ids.size] = torch.as_tensor(row.logprobs.copy())
    advantage = torch.tensor([[row.advantage] for row in rows])
    logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1] / temperature
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    ratio = torch.exp((logprobs - old[:, 1:]) * mask[:, 1:])
    token_loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) * mask[:, 1:]
    loss = token_loss.sum() / mask[:, 1:].sum()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.99), weight_decay=0.0).step()
    return loss.item(), float(norm), model


def uneven(seed: int = 0) -> list[Row]:
    """Two groups of unequal size and length: several rows a rollout, shared prompts, forks, tool output between samples."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(3, VOCABULARY, 40).tolist()

    def row(length: int, context: int = 0):
        ids = prompt + rng.integers(3, VOCABULARY, length).tolist()
        mask = [0] * 40 + [1] * (length - context) + [0] * context
        return sequence(ids, mask, [m * float(np.log(1 / VOCABULARY) + rng.normal() * 0.3) for m in mask])

    orders = [
        group(rollout(1, row(5), row(30, 12)), rollout(0, row(60)), rollout(0.5, row(3)), rollout(0)),
        group(rollout(0, row(9)), rollout(1, row(2), row(2), row(17))),
    ]
    waiting = Assembly(groups_per_step=2, max_staleness=4, vocabulary=VOCABULARY, temperature=1.0)
    assert [waiting.add(order) for order in orders] == [None, None]
    step = waiting.take(1)
    assert step is not None
    return step.rows


@pytest.mark.parametrize(
    ("activations", "temperature"),
    [(4 * 2**30, 1.0), (900_000, 0.7), (1, 1.0)],
    ids=["one micro-batch", "some, at temperature 0.7", "one a row"],
)
async def test_loss_gradient_and_weights_equal_the_oracle(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, activations: int, temperature: float
) -> None:
    import torch
    from safetensors.torch import load_file

    from evener_learner import trainer

    monkeypatch.setattr(trainer, "ACTIVATION_BYTES", activations)
    rows = uneven()
    (result,) = await train([rows], policy, tmp_path, temperature=temperature)
    loss, norm, model = oracle(policy, rows, temperature)
    assert result.metrics["loss"] == pytest.approx(loss, abs=1e-4)
    assert result.metrics["grad_norm"] == pytest.approx(norm, abs=1e-4)
    assert (result.metrics["micro_batches"] == 1) == (activations == 4 * 2**30)
    if activations == 1:
        assert result.metrics["micro_batches"] == len(rows)
    written = load_file(result.weights / "model.safetensors")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(written[name], parameter.detach(), atol=2e-5, rtol=0)


async def test_how_a_step_is_cut_changes_no_metric(policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from evener_learner import trainer

    (whole,) = await train([uneven()], policy, tmp_path / "a")
    monkeypatch.setattr(trainer, "ACTIVATION_BYTES", 1)
    (cut,) = await train([uneven()], policy, tmp_path / "b")
    for name in ("loss", "grad_norm", "kl", "ratio", "entropy", "clip_fraction"):
        assert cut.metrics[name] == pytest.approx(whole.metrics[name], abs=1e-4), name


async def test_whole_groups_each_step_moves_once_whatever_its_number_of_rows(policy: Path, tmp_path: Path) -> None:
    import torch

    rows = uneven()
    results = await train([rows, rows[:2], rows[3:]], policy, tmp_path)
    assert [result.weights.name for result in results] == ["1", "2", "3"]
    state = torch.load(results[-1].checkpoint / "optimizer.pt", weights_only=True)
    assert {int(one["step"]) for one in state["state"].values()} == {3}


async def test_the_published_folder_is_a_policy_and_the_last_two_are_kept(policy: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    results = await train([uneven(), uneven(), uneven()], policy, tmp_path)
    folder = results[-1].weights
    assert (folder / "config.json").read_bytes() == (policy / "config.json").read_bytes()
    _, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert len(AutoTokenizer.from_pretrained(folder)) == VOCABULARY
    assert sorted(path.name for path in folder.parent.iterdir()) == ["2", "3"]


async def test_warm_up_moves_from_the_first_step(policy: Path, tmp_path: Path) -> None:
    results = await train([uneven()] * 4, policy, tmp_path, warmup_steps=2)
    assert [result.metrics["learning_rate"] / RATE for result in results] == pytest.approx([1 / 3, 2 / 3, 1, 1])


async def test_resumed_training_goes_on_where_it_stopped(policy: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    rows = [uneven(seed) for seed in range(4)]
    whole = await train(rows, policy, tmp_path / "whole", warmup_steps=3)
    first = await train(rows[:2], policy, tmp_path / "first", warmup_steps=3)
    second = await train(rows[2:], first[-1].weights, tmp_path / "second", warmup_steps=3, checkpoint=first[-1].checkpoint)
    expected, resumed = (load_file(results[-1].weights / "model.safetensors") for results in (whole, second))
    assert all(np.allclose(expected[name], resumed[name], atol=1e-6) for name in expected)


async def test_exact_a_step_that_is_not_finite_is_not_applied(policy: Path, tmp_path: Path) -> None:
    (row, *others) = uneven()
    poisoned = Row(row.ids, row.mask, np.where(row.mask, np.nan, 0).astype(np.float32), row.advantage)
    with pytest.raises(InfraError, match="not applied"):
        await train([[poisoned, *others]], policy, tmp_path)
    assert not list((tmp_path / "weights").glob("*"))


def test_a_nan_and_a_future_version_never_reach_the_trainer() -> None:
    waiting = Assembly(groups_per_step=1, max_staleness=4, vocabulary=VOCABULARY, temperature=1.0)
    refusal = waiting.add(group(rollout(1, sequence([1, 2], [0, 1], [0, math.nan])), rollout(0)))
    assert refusal is not None
    assert waiting.add(pair(version=9)) is None
    assert [one.reason for one in waiting.sweep(8, set(range(9)))] == ["future_version"]
    assert waiting.take(8) is None
    assert not isinstance(refusal, Group)
