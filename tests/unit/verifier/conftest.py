import pytest

from evener.blobs import Blobs
from evener.sandbox.probe import bubblewrap_missing
from evener_verifier import verifier
from tests.unit.verifier.orders import order


@pytest.fixture(params=["bubblewrap", "process"])
async def kind(request):
    if request.param == "bubblewrap" and (missing := await bubblewrap_missing()):
        pytest.skip(f"bubblewrap does not work here: {missing}")
    return request.param


@pytest.fixture
def blobs(tmp_path):
    return Blobs(tmp_path / "blobs")


@pytest.fixture
def score(blobs, kind, tmp_path):
    async def run(test, workspace=None, **more):
        scored = await verifier.score(order(blobs, kind, test, workspace, **more), blobs, tmp_path / "sandboxes")
        assert not list((tmp_path / "sandboxes").glob("*")), "a sandbox was left behind"
        return scored

    return run
