"""One pydantic model is the schema of a run file; an unknown key is an error that names the nearest one.

Paths in the file are relative to the file. Read by the command line, which submits the model as JSON.
"""

import difflib
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from evener.api.types import PromptMode, Thinking
from evener.errors import InputError
from evener.settings import SandboxKind


class Section(BaseModel):
    """A table of the run file."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Harness(Section):
    """``[[harness]]``: an agent that works on the tasks, and its share of the groups."""

    name: str
    profile: str = "default"
    weight: float = Field(default=1.0, gt=0)


class Rollouts(Section):
    """``[rollouts]``: how groups are rolled out."""

    group_size: int = Field(default=8, ge=2, le=1024)
    concurrent: int = Field(default=16, ge=1)
    sandbox: SandboxKind = "auto"
    temperature: float = Field(default=1.0, gt=0, le=10)
    prompt: PromptMode = Field(default="render", description="token_in: from the sampled tokens, where the template allows it")
    thinking: Thinking = Field(default="keep", description="of earlier turns, in token_in: keep what was sampled, or strip")


class Budget(Section):
    """``[budget]``: what one rollout may spend."""

    calls: int = Field(default=50, ge=1)
    sampled_tokens: int = Field(default=32768, ge=1)
    context_tokens: int | None = Field(default=None, ge=1)
    wall_s: float = Field(default=1800.0, gt=0)


class Reward(Section):
    """``[reward]``: what is added to the score."""

    brevity: float = Field(default=0.0, ge=0, lt=1, description="at most this much for fewer tool calls, on solved tasks only")


class Train(Section):
    """``[train]``: GRPO. Present: the run trains; absent: it evaluates."""

    steps: int = Field(default=40, ge=1)
    groups_per_step: int = Field(default=4, ge=1)
    learning_rate: float = Field(default=1e-6, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    max_staleness: int = Field(default=4, ge=0)
    seed: int = 0


class Eval(Section):
    """``[eval]``: held-out tasks, evaluated before training, every so many steps (0: never between) and at the end."""

    tasks: Path
    every: int = Field(default=0, ge=0)
    group_size: int = Field(default=4, ge=1)


class RunFile(Section):
    """A run file."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    policy: str
    tasks: Path
    harness: list[Harness] = Field(min_length=1)
    rollouts: Rollouts = Rollouts()
    budget: Budget = Budget()
    reward: Reward = Reward()
    train: Train | None = None
    eval: Eval | None = None

    @property
    def kind(self) -> Literal["train", "eval"]:
        """What the run does."""
        return "eval" if self.train is None else "train"


def read(path: Path) -> RunFile:
    """The run file at ``path``, its paths made absolute. Raises InputError that names file and key."""
    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        raise InputError("run_file_invalid", f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError("run_file_invalid", f"{path}: {error}") from error
    try:
        run = RunFile.model_validate(document)
    except ValidationError as error:
        raise InputError("run_file_invalid", f"{path}: {explain(error, RunFile)}") from error
    base = path.resolve().parent
    policy = base / run.policy
    return run.model_copy(
        update={
            "tasks": base / run.tasks,
            "policy": str(policy) if run.policy.startswith((".", "/")) or policy.exists() else run.policy,
            "eval": run.eval and run.eval.model_copy(update={"tasks": base / run.eval.tasks}),
        }
    )


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """The first fault of a document as ``key: what is wrong``, with the nearest known key where it is unknown."""
    fault = error.errors()[0]
    place = [str(part) for part in fault["loc"]]
    key = ".".join(place)
    if fault["type"] != "extra_forbidden":
        return f"{key}: {fault['msg']}"
    known = list(_table(model, place[:-1]).model_fields)
    near = difflib.get_close_matches(place[-1], known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
    return f"{key}: unknown key; {hint}"


def _table(model: type[BaseModel], place: list[str]) -> type[BaseModel]:
    for name in place:
        if name.isdigit():
            continue
        annotation: Any = model.model_fields[name].annotation
        candidates = [annotation, *get_args(annotation)]
        model = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return model
