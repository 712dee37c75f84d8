"""The example's scripts are plain files beside each other, found as a user finds them: from their own folder."""

import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "first-run"
sys.path.insert(0, str(EXAMPLE))
