"""One optimizer step of TRL's AsyncGRPO is exactly the rows of one assembled step, and nothing else is ever trained.

This is the only module that imports TRL. TRL's loss, optimizer loop and prefix-tree packing are used as they are; its data
loader is not, for three reasons that each break whole groups. It takes a fixed number of *samples* a step, while a rollout may
have several rows, so that groups would be split; padding a step with empty rows would be no remedy, since a row without a
trained token crashes it. Accelerate's dispatcher behind it fetches one micro-batch ahead, so that a step would wait for the
first group of the next one, and staleness would be judged one version early. And it normalises each micro-batch by its own
tokens, so that the loss would depend on how a step is cut. Here the data loader yields one step at a time, as the list of
its micro-batches, each of which says the number of trained tokens of the *whole step*; `training_step` runs them in turn
before the one optimizer step (gradient accumulation is 1 for TRL). The loss is the token mean over the step.

Where CUDA is absent two seams of TRL are replaced: the look-up of the device's peak FLOPS and the attention kernel. On CUDA
TRL runs as it is, which needs the `kernels` package and a GPU that runs FlashAttention 3. TRL's client of a vLLM server is
left out everywhere: weights leave by our own way, and making it wants a package that nothing else here does. `run` is called
in the trainer's thread.
"""

import json
import math
import queue
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from safetensors.torch import save_file
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoTokenizer, PrinterCallback, ProgressCallback, TrainerCallback

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TRL says on import that this trainer is experimental: hence the exact pin
    from trl.experimental.async_grpo import async_grpo_trainer, packing
    from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig

from evener.errors import InfraError
from evener_learner.admission import Row
from evener_learner.attention import tree_attention
from evener_learner.worker import Feed, StepResult, Stopped

_trl: Any = async_grpo_trainer  # it has no types
MAX_STEPS = 2**31 - 1  # the feed ends training; TRL wants a number
ACTIVATION_BYTES = 4 * 2**30
"""Memory for the activations of one micro-batch; more rows are cut into several, with the same loss."""
CHECKPOINT_EACH_STEP_BYTES = 64 * 2**20
CHECKPOINT_EVERY = 10
"""An optimizer state above `CHECKPOINT_EACH_STEP_BYTES` is written every so many steps."""
MEANS = ("ratio", "kl", "entropy", "clip_ratio/region_mean")
"""Token means that TRL logs per micro-batch."""


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """What to train and how. ``folder`` is ours to write; ``checkpoint`` is a folder that `run` wrote before."""

    policy: Path
    folder: Path
    checkpoint: Path | None
    learning_rate: float
    warmup_steps: int
    temperature: float
    seed: int


def run(options: TrainOptions, feed: Feed) -> None:
    """Load the policy and train the steps that ``feed`` gives, until it stops. Raises what a step raises."""
    trainer = make_trainer(options, feed)
    feed.ready()
    try:
        trainer.train(resume_from_checkpoint=None if options.checkpoint is None else str(options.checkpoint))
    except Stopped:
        pass
    finally:
        trainer.accelerator.free_memory()


def make_trainer(options: TrainOptions, feed: Feed) -> "StepTrainer":
    """The trainer of the policy folder ``options.policy``. Raises what transformers raises for a folder it cannot load."""
    cuda = torch.cuda.is_available()
    _trl.VLLMClient = _nothing
    if not cuda:
        _trl.get_peak_flops_per_device = _nothing
        packing.tree_attention = tree_attention
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # TRL sets options by their former names
        arguments = _arguments(options, cuda)
    return StepTrainer(options, feed, arguments)


def _arguments(options: TrainOptions, cuda: bool) -> AsyncGRPOConfig:
    return AsyncGRPOConfig(
        output_dir=str(options.folder / "trl"),
        max_steps=MAX_STEPS,
        learning_rate=options.learning_rate,
        warmup_steps=options.warmup_steps,
        optim="adamw_torch",
        adam_beta1=0.9,
        adam_beta2=0.99,
        weight_decay=0.0,
        max_grad_norm=1.0,
        epsilon=0.2,
        temperature=options.temperature,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        token_budget=0,
        seed=options.seed,
        dtype="float32",
        use_cpu=not cuda,
        bf16=cuda,
        gradient_checkpointing=cuda,
        dataloader_pin_memory=False,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


class StepTrainer(_trl.AsyncGRPOTrainer):
    """TRL's trainer with steps for batches."""

    def __init__(self, options: TrainOptions, feed: Feed, arguments: AsyncGRPOConfig) -> None:
        self._feed = feed
        self._options = options
        self._weights = _WeightFolders(options.policy, options.folder / "weights")
        self._step_loss = 0.0
        self._step_grad_norm = 0.0
        self._logs: dict[str, float] = {}
        super().__init__(
            model=str(options.policy),
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": [""]}),
            processing_class=AutoTokenizer.from_pretrained(str(options.policy)),
            callbacks=[_KeepLogs(self._logs.update)],
            rollout_worker=_NoRollouts(),
            weight_transfer=self._weights,
        )
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)

    def get_train_dataloader(self) -> "DataLoader[Any]":
        """Steps from the feed; not prepared by Accelerate, whose dispatcher would fetch one ahead."""
        self._rollout_dataset = _Steps(self, self._feed)  # TRL reads its `wait_s`
        return DataLoader(self._rollout_dataset, batch_size=None, collate_fn=_as_is)

    def micro_batches(self, rows: Sequence[Row]) -> list[dict[str, torch.Tensor]]:
        """The rows as TRL's packed micro-batches, each normalised by the trained tokens of all rows."""
        collate = _trl.DataCollatorForRollout(
            self.processing_class.pad_token_id, groups_trained=self._trained_groups, metrics=self._metrics["train"]
        )
        batches = [collate.torch_call([[tree]]) for tree in pack(rows, token_budget(self.model.config.get_text_config()))]
        total = sum(float(batch["global_n_tokens"][0]) for batch in batches)
        for batch in batches:
            batch["global_n_tokens"] = torch.full_like(batch["global_n_tokens"], total)
        return batches

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward of every micro-batch of a step; returns the step's loss."""
        losses: list[torch.Tensor] = []
        for batch in inputs:
            self._feed.check()
            losses.append(super().training_step(model, batch, num_items_in_batch))
            self._weigh_means(int((batch["token_index"] >= 0).sum()))
        loss = torch.stack(losses).sum()
        self._step_loss = float(loss)
        return loss

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Linear warm-up over ``warmup_steps``, then constant. The first step moves too: transformers' has a rate of 0."""
        del num_training_steps
        steps = self._options.warmup_steps + 1
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, lambda done: min(1.0, (done + 1) / steps))
        self.lr_scheduler: Any = scheduler
        return scheduler

    def floating_point_ops(self, inputs: Any) -> int:
        """Nobody reads it, and a step is no single batch."""
        del inputs
        return 0

    def outcome(self) -> StepResult:
        """What the step that has just ended made."""
        metrics = {
            "loss": self._step_loss,
            "grad_norm": self._step_grad_norm,
            "learning_rate": self._logs["learning_rate"],
            "ratio": self._logs["ratio"],
            "kl": self._logs["kl"],
            "entropy": self._logs["entropy"],
            "clip_fraction": self._logs["clip_ratio/region_mean"],
            "micro_batches": self._logs["batch/microbatches_per_step"],
            "packed_tokens": self._logs["batch/forwarded_tokens_per_step"],
            "forward_backward_s": self._logs["perf/fwd_bwd_s"],
        }
        return StepResult(self._weights.latest, metrics, self._checkpoint())

    def _checkpoint(self) -> Path | None:
        """Optimizer, scheduler and step count; the weights are in the policy folder of the same step."""
        small = 8 * sum(p.numel() for p in self.model.parameters() if p.requires_grad) < CHECKPOINT_EACH_STEP_BYTES
        if not small and self.state.global_step % CHECKPOINT_EVERY:
            return None
        folder = self._options.folder / "checkpoint"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._save_optimizer_and_scheduler(str(folder))
        self.state.save_to_json(str(folder / "trainer_state.json"))
        return folder

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """The weights were loaded with the policy."""

    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        norm = super()._clip_grad_norm(model)
        self._step_grad_norm = float(norm)
        if not math.isfinite(self._step_grad_norm) or not math.isfinite(self._step_loss):
            step = self.state.global_step + 1
            raise InfraError(
                "internal", f"step {step}: loss {self._step_loss}, gradient norm {self._step_grad_norm}; not applied"
            )
        return norm

    def _weigh_means(self, tokens: int) -> None:
        """Turn the micro-batch's means into the pairs that TRL reduces as a rate, so that the step's are token means."""
        for name in MEANS:
            values = self._metrics["train"][name]
            values[-1] = (values[-1] * tokens, tokens)

    def _send_telemetry(self) -> None:
        """A training run reports to nobody."""


class _Steps(IterableDataset[Any]):
    """One item a step. The next one is asked for when the optimizer has moved and the logs are written."""

    def __init__(self, trainer: StepTrainer, feed: Feed) -> None:
        self._trainer = trainer
        self._feed = feed
        self.wait_s = 0.0

    def __iter__(self) -> Iterator[list[dict[str, torch.Tensor]]]:
        while True:
            started = time.monotonic()
            rows = self._feed.next()
            self.wait_s += time.monotonic() - started
            yield self._trainer.micro_batches(rows)
            self._feed.done(self._trainer.outcome())


class _NoRollouts:
    """TRL's rollout worker: rollouts come through the feed, so nothing is to be started, asked or stopped."""

    def __init__(self) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def update_model_version(self, model_version: int) -> None: ...

    def check_health(self, stale_after_s: float) -> None: ...


class _WeightFolders:
    """TRL's weight transfer: each publication becomes a policy folder; the last two are kept, one may be in use.

    TRL publishes once before the first step: those weights have a version already, and are skipped.
    """

    def __init__(self, policy: Path, folder: Path) -> None:
        self._policy = policy
        self._folder = folder
        self._publications = 0
        self._previous: Path | None = None
        self.latest = policy
        shutil.rmtree(folder, ignore_errors=True)

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Write config and tokenizer of the policy beside the new weights."""
        self._publications += 1
        if self._publications == 1:
            return
        target = self._folder / str(self._publications - 1)
        target.mkdir(parents=True)
        for file in self._policy.iterdir():
            if file.is_file() and not _is_weights(file):
                shutil.copy2(file, target)
        tensors = {name: tensor.cpu().contiguous() for name, tensor in iterator}
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        if self._previous is not None:
            shutil.rmtree(self._previous)
        self._previous = self.latest if self.latest != self._policy else None
        self.latest = target

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


class _KeepLogs(TrainerCallback):
    def __init__(self, keep: Callable[[dict[str, float]], None]) -> None:
        self._keep = keep

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Keep what TRL measured."""
        del args, state, control
        self._keep(logs or {})


def pack(rows: Sequence[Row], budget: int) -> list[Any]:
    """TRL's prefix trees of ``rows`` in order, each of at most ``budget`` distinct tokens, or of one longer row."""
    trees = [packing.TreeRow()]
    for row in rows:
        sample = {
            "input_ids": row.ids,
            "completion_mask": row.mask,
            "old_log_probs": row.logprobs,
            "advantage": row.advantage,
            "group_id": 0,
            "metrics": {},
        }
        if trees[-1].samples and not trees[-1].fits(sample, budget):
            trees.append(packing.TreeRow())
        trees[-1].add(sample)
    return trees


def token_budget(config: Any) -> int:
    """Tokens whose activations fit `ACTIVATION_BYTES`: about 16 hidden and 4 intermediate float32 vectors a layer are kept."""
    layer = 16 * config.hidden_size + 4 * (getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    return max(1, ACTIVATION_BYTES // (4 * layer * config.num_hidden_layers))


def policy_vocabulary(policy: Path) -> int:
    """The number of token ids of the policy folder's model."""
    config = json.loads((policy / "config.json").read_text())
    return int(config.get("text_config", config)["vocab_size"])


def _is_weights(file: Path) -> bool:
    return file.name.endswith((".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json"))


def _nothing(*_: object) -> None: ...


def _as_is(step: Any) -> Any:
    return step
