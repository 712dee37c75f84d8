"""`python -m evener_engine --policy DIR --port N`: the engine by itself, for tests and benchmarks."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .service import serve
from .weights import PolicyError


def main() -> int:
    """Serve until told to stop; 2 if the policy cannot be served."""
    parser = argparse.ArgumentParser(prog="evener_engine", description=__doc__)
    parser.add_argument("--policy", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--name", default="policy")
    parser.add_argument("--version", type=int, default=1)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--context-tokens", type=int)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int)
    arguments = vars(parser.parse_args())
    try:
        serve(**arguments)
    except PolicyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
