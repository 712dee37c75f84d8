"""What bubblewrap is told: everything inside is named here, and what is not named is not there.

Called by the bubblewrap sandbox, once a command. The result holds secrets (the environment) and is handed over through a
file descriptor.
"""

import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from evener.sandbox import forwarder, interpreter
from evener.sandbox.port import FORWARDER_PORT, HOME, Mount

ROOT_RUNS_AS = 65534
"""The user that a command is where root runs the sandbox: nobody, who owns nothing else."""
USER_RUNS_AS = 1000
PATH = "/usr/local/bin:/usr/bin:/bin"
_PROXY_FOLDER = "/run/evener"
_FORWARDER = "/opt/evener/forwarder.py"
_ETC = (
    "alternatives",
    "ca-certificates",
    "ca-certificates.conf",
    "ld.so.cache",
    "localtime",
    "mime.types",
    "nsswitch.conf",
    "pki",
    "ssl",
)
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_OWN_ETC = ("passwd", "group", "hosts")
_KERNELS = ("/proc", "/dev", "/sys")


@dataclass(frozen=True, slots=True)
class Inside:
    """What a command finds: ``writable`` maps paths inside to folders of the host; ``etc`` is a folder made by `write_etc`.

    ``root``: a root filesystem in place of the host's system. ``as_root`` counts where a user runs the sandbox.
    """

    writable: dict[str, Path]
    mounts: tuple[Mount, ...]
    etc: Path
    proxy: Path | None  # the folder of the proxy's socket
    root: Path | None = None
    as_root: bool = False

    def options(self, env: dict[str, str], cwd: str) -> list[str]:
        """bubblewrap's options, but for file descriptors."""
        mounts = [*self.mounts, *self._forwarder()]
        targets = [*(mount.target for mount in mounts), *self.writable]
        return [
            *_namespaces(0 if self.as_root else USER_RUNS_AS),
            *["--proc", "/proc", "--dev", "/dev"],
            *(_host_system() if self.root is None else _image_system(self.root, targets)),
            *_each("--ro-bind", ((str(self.etc / name), f"/etc/{name}") for name in _OWN_ETC)),
            *_folders(targets),
            *_each("--ro-bind", ((str(mount.source), mount.target) for mount in mounts)),
            *_each("--bind", ((str(host), path) for path, host in self.writable.items())),
            *_each("--setenv", {"PATH": PATH, "HOME": HOME, "USER": "agent", "LANG": "C.UTF-8", **env}.items()),
            *["--chdir", cwd, "--remount-ro", "/"],
        ]

    def command(self, argv: list[str]) -> list[str]:
        """``argv`` as the unprivileged user, with the forwarder beside it."""
        command = list(argv)
        if self.proxy is not None:
            python = [str(interpreter.executable()), "-I", "-S", "-E", _FORWARDER]
            command = [*python, str(FORWARDER_PORT), f"{_PROXY_FOLDER}/proxy.sock", *command]
        if os.geteuid() == 0:
            user = [f"--reuid={ROOT_RUNS_AS}", f"--regid={ROOT_RUNS_AS}", "--clear-groups", "--inh-caps=-all"]
            setpriv = "setpriv" if self.root is not None else shutil.which("setpriv") or "setpriv"
            command = [setpriv, *user, "--", *command]
        return command

    def _forwarder(self) -> Iterator[Mount]:
        if self.proxy is not None:
            yield Mount(self.proxy, _PROXY_FOLDER)
            yield Mount(Path(forwarder.__file__), _FORWARDER)
            yield from (Mount(path, str(path)) for path in interpreter.files())


def write_etc(folder: Path) -> None:
    """Make the files of /etc that tell who one is."""
    user = ROOT_RUNS_AS if os.geteuid() == 0 else USER_RUNS_AS
    folder.mkdir(mode=0o755)
    (folder / "passwd").write_text(f"root:x:0:0:root:/root:/bin/sh\nagent:x:{user}:{user}:agent:{HOME}:/bin/sh\n")
    (folder / "group").write_text(f"root:x:0:\nagent:x:{user}:\n")
    (folder / "hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")
    for file in folder.iterdir():
        file.chmod(0o644)


def _namespaces(user: int) -> list[str]:
    """``user``: who a command is where a user runs the sandbox."""
    options = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    options += ["--hostname", "sandbox", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    if os.geteuid() == 0:  # to become the unprivileged user, which drops them
        return [*options, "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    return [*options, "--unshare-user", "--uid", str(user), "--gid", str(user)]


def _host_system() -> list[str]:
    options = ["--ro-bind", "/usr", "/usr", *_folders(["/etc/passwd"])]
    for name in _SYSTEM:
        path = Path(name)
        if path.is_symlink():
            options += ["--symlink", str(path.readlink()), name]
        elif path.is_dir():
            options += ["--ro-bind", name, name]
    return options + _each("--ro-bind-try", ((f"/etc/{name}", f"/etc/{name}") for name in _ETC))


def _image_system(root: Path, targets: list[str]) -> list[str]:
    """All of a root filesystem but what ``targets`` and files of ours take the place of; folders above those are made anew."""
    taken = {Path(path) for path in (*targets, *_KERNELS, *(f"/etc/{name}" for name in _OWN_ETC))}
    above = {parent for path in taken for parent in path.parents}
    options: list[str] = _folders(sorted(str(path) for path in taken))

    def expose(folder: Path) -> None:
        for entry in sorted((root / folder.relative_to("/")).iterdir()):
            inside, mode = folder / entry.name, entry.lstat().st_mode
            if inside in taken or (inside in above and not stat.S_ISDIR(mode)):
                continue
            if inside in above:
                expose(inside)
            elif stat.S_ISLNK(mode):
                options.extend(["--symlink", str(entry.readlink()), str(inside)])
            elif stat.S_ISDIR(mode) or stat.S_ISREG(mode):
                options.extend(["--ro-bind", str(entry), str(inside)])

    expose(Path("/"))
    return options


def _folders(targets: list[str]) -> list[str]:
    """Make the parents of mount points, open to all: bubblewrap would make them for their owner alone."""
    parents = dict.fromkeys(parent for target in targets for parent in reversed(Path(target).parents) if parent != Path("/"))
    return [option for parent in parents for option in ("--perms", "0755", "--dir", str(parent))]


def _each(option: str, pairs: Iterable[tuple[str, str]]) -> list[str]:
    return [word for pair in pairs for word in (option, *pair)]
