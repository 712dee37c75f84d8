import msgspec
import pytest

from evener import messages
from evener.errors import CAUSES, Boundary, InfraError, InputError, Outcome, TaskError

EXAMPLES = [
    messages.RunRollout(run_id="r", rollout_id="o", attempt=1),
    messages.ScoreWorkspace(run_id="r", rollout_id="o", attempt=2),
    messages.TrainGroup(run_id="r", policy="p", group_id="g"),
    messages.RolloutFinished(
        rollout_id="o",
        attempt=1,
        lease="l",
        outcome=Outcome.FINISHED,
        sealed=messages.Sealed(committed=2, aborted=0, lost=0, undelivered=1),
    ),
    messages.RolloutScored(rollout_id="o", attempt=1, scores={"reward": 0.5}, evidence={"exit": 0}),
    messages.GroupClosed(group_id="g", epoch=1, disposition="skipped", reason="no_signal"),
    messages.StepFinished(run_id="r", policy="p", epoch=1, step=3, version=4, groups=["g"], metrics={"loss": 0.1}),
    messages.PolicyPublished(policy="p", epoch=1, version=4, step=3, weights="sha256:0"),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_round_trip(message: messages.Message):
    assert messages.decode(messages.encode(message)) == message


def test_a_field_of_a_later_version_is_let_through():
    body = msgspec.json.decode(messages.encode(EXAMPLES[0])) | {"later": 1}
    assert messages.decode(msgspec.json.encode(body)) == EXAMPLES[0]


@pytest.mark.parametrize("body", [b"", b"{}", b'{"type":"Nonsense"}', b'{"type":"RunRollout","run_id":1}'])
def test_poison_is_refused(body: bytes):
    with pytest.raises(msgspec.DecodeError):
        messages.decode(body)


def test_queues():
    assert [messages.queue_of(m) for m in EXAMPLES] == ["rollouts.run", "workspaces.score", "groups.train.p"] + [
        "ledger.events"
    ] * 5


def test_every_cause_has_a_remedy_and_its_class():
    for name, cause in CAUSES.items():
        assert cause.text, name
        assert cause.remedy, name
    assert InputError("port_occupied", "8700").exit_code == 2
    assert InfraError("blob_missing", "x").exit_code == 1
    assert TaskError("reward_missing", "x").boundary is Boundary.TASK
    assert str(InputError("port_occupied", "8700")) == (
        "another program listens on the port: 8700 (stop it, or set the port's EVENER_*_PORT)"
    )
