from pathlib import PurePosixPath

import pytest

from evener.artifacts import collects, place_of, places_of


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("out", "/workspace"),
        (".", "/workspace"),
        ("/workspace/a/b", "/workspace"),
        ("/logs/artifacts", "/logs/artifacts"),
        ("/logs/artifacts/a/b.txt", "/logs/artifacts"),
        ("/data", "/data"),
        ("/data/", "/data"),
        ("/app/answer.txt", "/app"),
        ("/var/lib/thing/out", "/var/lib/thing"),
    ],
)
def test_the_folder_around_an_artifact(source, place):
    assert place_of(source) == place


@pytest.mark.parametrize(
    "source",
    [
        "/",
        "../x",
        "/workspace/../etc",
        "/etc/passwd",
        "/usr/local/x",
        "/home/agent/.bashrc",
        "/tmp/x",
        "/logs/verifier/reward.txt",
    ],
)
def test_where_no_artifact_can_lie(source):
    with pytest.raises(ValueError, match=r"agents cannot leave artifacts there|leads elsewhere"):
        place_of(source)


def test_a_file_needs_a_folder_around_it():
    with pytest.raises(ValueError, match="needs a folder around it"):
        place_of("/answer.txt")


def test_no_place_is_below_another():
    assert places_of(["/data/a", "/data/b/c", "/data/b/d/e", "/database/x", "out"]) == ("/data", "/database")


@pytest.mark.parametrize(
    ("path", "exclude", "kept"),
    [
        ("/data/out", (), True),
        ("/data/out/a", (), True),
        ("/data/output", (), False),
        ("/data", (), False),
        ("/data/out/a.tmp", ("*.tmp",), False),
        ("/data/out/deep/a.tmp", ("*.tmp",), False),
        ("/data/out/cache/a", ("cache",), False),
        ("/data/out/cache/a", ("./cache/",), False),
        ("/data/out/deep/cache/a", ("deep/cache",), False),
        ("/data/out/mycache/a", ("cache",), True),
        ("/data/out", ("out",), True),
    ],
)
def test_what_an_artifact_holds(path, exclude, kept):
    """Patterns are those of ``tar --exclude``: anywhere below the source, and with all that is below what they match."""
    assert collects("/data/out", exclude, PurePosixPath(path)) is kept
