"""Groups as the API gives them out, and a policy small enough to train in a test."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from evener.api import GroupOrder, Provenance, Sampled, TrainedRollout, TrainedSequence
from evener.ids import new_id, session_id
from evener.trace.prefix import prefix_digests
from evener.trace.provenance import row_digest, sample_digest, version_tokens

VOCABULARY = 64


def sequence(
    ids: Sequence[int],
    mask: Sequence[int],
    logprobs: Sequence[float] | None = None,
    versions: Sequence[int] | int = 1,
    *,
    name: str | None = None,
) -> TrainedSequence:
    """A sequence that holds; log-probabilities default to -1 and versions to 1 where the mask is 1."""
    trained = np.asarray(mask, np.uint8)
    values = np.where(trained, -1.0, 0.0) if logprobs is None else np.asarray(logprobs)
    arrays = (
        np.asarray(ids, "<i4").tobytes(),
        trained.tobytes(),
        values.astype("<f4").tobytes(),
        (np.asarray(versions, "<i4") * (trained != 0)).astype("<i4").tobytes(),
    )
    return proven(name or new_id(), *arrays)


def proven(name: str, ids: bytes, mask: bytes, logprobs: bytes, versions: bytes) -> TrainedSequence:
    """A sequence of these arrays, with the digest and the provenance that fit them: a call for each run of the mask."""
    trained = np.frombuffer(mask, np.uint8) != 0
    provenance = None
    if len(ids) == len(logprobs) == len(versions) == 4 * len(mask):
        tokens, values = np.frombuffer(ids, "<i4"), np.frombuffer(versions, "<i4")
        edges = np.flatnonzero(np.diff(np.concatenate(([False], trained, [False])))).reshape(-1, 2)
        calls = [_call(f"{name}-{start}", slice(start, end), tokens, logprobs, values) for start, end in edges.tolist()]
        count = int(trained.sum())
        provenance = Provenance(
            session_id="s.1",
            given=len(mask) - count,
            sampled=count,
            trained=count,
            untrained={},
            versions=version_tokens(values[trained]),
            engines=["http://engine"] if calls else [],
            calls=calls,
        )
    digest = row_digest(ids, mask, logprobs, versions)
    return TrainedSequence(
        sequence_id=name, ids=ids, mask=mask, logprobs=logprobs, versions=versions, digest=digest, provenance=provenance
    )


def _call(name: str, at: slice, ids: np.ndarray, logprobs: bytes, versions: np.ndarray) -> Sampled:
    return Sampled(
        call_id=name,
        start=at.start,
        end=at.stop,
        untrained=None,
        prompt=prefix_digests(ids, [at.start])[at.start].hex(),
        sample=sample_digest(ids[at], np.frombuffer(logprobs, "<f4")[at], versions[at]),
        engine="http://engine",
        version_dispatch=1,
        version_completion=1,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
    )


def rollout(reward: float, *sequences: TrainedSequence, name: str | None = None) -> TrainedRollout:
    """A finished rollout, whose sequences are of its first attempt."""
    rollout_id = name or new_id()
    return TrainedRollout(
        rollout_id=rollout_id,
        outcome="finished",
        score=reward,
        reward=reward,
        sequences=[_sampled_in(session_id(rollout_id, 1), each) for each in sequences],
    )


def _sampled_in(session: str, made: TrainedSequence) -> TrainedSequence:
    if made.provenance is None:
        return made
    return replace(made, provenance=replace(made.provenance, session_id=session))


def group(*rollouts: TrainedRollout, name: str | None = None, run_id: str = "run") -> GroupOrder:
    """A closed group."""
    return GroupOrder(
        group_id=name or new_id(), run_id=run_id, task_id="task", harness="pi", temperature=1.0, rollouts=list(rollouts)
    )


def pair(version: int = 1, name: str | None = None) -> GroupOrder:
    """The smallest group with a signal, sampled by ``version``."""
    return group(
        rollout(1.0, sequence([1, 2, 3], [0, 1, 1], versions=version)),
        rollout(0.0, sequence([1, 2, 4], [0, 1, 1], versions=version)),
        name=name,
    )


def tiny_policy(folder: Path, *, hidden: int = 32, seed: int = 0) -> Path:
    """A random Qwen3 policy folder with a tokenizer."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words = models.WordLevel({f"w{token}": token for token in range(VOCABULARY)}, unk_token="w2")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="w0", eos_token="w1").save_pretrained(folder)
    return folder
