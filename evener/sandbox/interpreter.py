"""The host's own Python runs the forwarder inside a sandbox, wherever it is installed: /usr, pyenv, conda, uv.

Only what ``python -I -S -E`` needs is named: the real executable, the standard library, and libpython where it is shared. They
are mounted at their own paths, because an executable finds its library and its modules by them. Called by `arguments`.
"""

import sys
import sysconfig
from functools import cache
from pathlib import Path


@cache
def executable() -> Path:
    """The interpreter itself, not the link or the copy in a virtual environment."""
    real = Path(sys.executable).resolve()
    if sys.prefix != sys.base_prefix and real.is_relative_to(Path(sys.prefix).resolve()):
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return (Path(sys.base_prefix) / "bin" / f"python{version}").resolve()
    return real


@cache
def files() -> list[Path]:
    """What has to be mounted beside /usr."""
    paths = [executable(), *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))]
    if sysconfig.get_config_var("Py_ENABLE_SHARED"):
        paths += Path(sysconfig.get_config_var("LIBDIR")).glob(sysconfig.get_config_var("LDLIBRARY") + "*")
    return [path for path in dict.fromkeys(paths) if path.exists() and not path.is_relative_to("/usr")]
