"""Inside a grader's sandbox: run a command of the candidate's in the candidate's own sandbox.

    python -I -S -E candidate.py SOCKET [--timeout SECONDS] [--] COMMAND [ARGUMENT ...]

Standard input goes there, what the command prints comes back, and so does its exit code; 124: its time was over. It stands
alone, and imports only modules that are built in, so that a call costs its two starts and little more.
"""

import _socket
import os
import sys

USAGE = "usage: candidate [--timeout SECONDS] [--] COMMAND [ARGUMENT ...]\n"
UNUSABLE = 125
TIMED_OUT = 124
MAX_STDIN = 16 << 20


def send(connection: _socket.socket, words: "list[bytes]") -> None:
    """Send a frame (see channel.py)."""
    connection.sendall(len(words).to_bytes(4, "big") + b"".join(len(word).to_bytes(8, "big") + word for word in words))


def receive(connection: _socket.socket, size: int) -> bytes:
    """Exactly so many bytes. Raises EOFError."""
    data = b""
    while len(data) < size:
        piece = connection.recv(min(size - len(data), 1 << 16))
        if not piece:
            raise EOFError
        data += piece
    return data


def write(descriptor: int, data: bytes) -> None:
    """Write all of it."""
    while data:
        data = data[os.write(descriptor, data) :]


def standard_input() -> bytes:
    """All of it, or a little more than is allowed."""
    data = b""
    while len(data) <= MAX_STDIN:
        piece = os.read(0, 1 << 16)
        if not piece:
            break
        data += piece
    return data


def parsed(arguments: "list[str]") -> "tuple[str, list[str]]":
    """The time in seconds, or nothing, and the command. Raises ValueError."""
    timeout = ""
    while arguments and arguments[0].startswith("-"):
        option = arguments.pop(0)
        if option == "--":
            break
        if option == "--timeout" and arguments:
            timeout = arguments.pop(0)
        elif option.startswith("--timeout="):
            timeout = option[len("--timeout=") :]
        else:
            raise ValueError(option)
        if not float(timeout) > 0:
            raise ValueError(timeout)
    if not arguments:
        raise ValueError("no command")
    return timeout, arguments


def main(path: str, *arguments: str) -> int:
    """Ask and answer; returns the exit code."""
    try:
        timeout, command = parsed(list(arguments))
    except ValueError:
        write(2, USAGE.encode())
        return UNUSABLE
    data = standard_input()
    if len(data) > MAX_STDIN:
        write(2, b"candidate: over 16 MiB of standard input\n")
        return UNUSABLE
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    folder, name = os.path.split(path)
    try:
        os.chdir(folder)  # a socket's path has at most 107 bytes
        connection.connect(name)
        send(connection, [timeout.encode(), data, *(os.fsencode(word) for word in command)])
        words = [receive(connection, int.from_bytes(receive(connection, 8), "big")) for _ in range(_count(connection))]
    except (OSError, EOFError) as error:
        write(2, f"candidate: the verifier does not answer: {error}\n".encode())
        return UNUSABLE
    code, stdout, stderr = words
    write(1, stdout)
    write(2, stderr)
    return int(code)


def _count(connection: _socket.socket) -> int:
    return int.from_bytes(receive(connection, 4), "big")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
