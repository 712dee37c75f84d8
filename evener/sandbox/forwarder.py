"""Inside a sandbox without a network: 127.0.0.1:PORT is the proxy's unix socket, for as long as the command runs.

    python -I -S -E forwarder.py PORT SOCKET COMMAND [ARGUMENT ...]

It listens before it starts the command, so that no request comes too early, copies bytes both ways, and exits as the
command does. It stands alone, and imports only modules that are built in: with ``socket`` and ``threading`` each rollout
would pay 20 ms of CPU more to start it.
"""

import _socket
import _thread
import os
import sys

BACKLOG = 128
CHUNK = 65536


def copy(source: _socket.socket, target: _socket.socket) -> None:
    """Copy until ``source`` ends, then end ``target``'s input; a broken end breaks both."""
    try:
        while data := source.recv(CHUNK):
            target.sendall(data)
        target.shutdown(_socket.SHUT_WR)
    except OSError:
        for end in (source, target):
            try:  # noqa: SIM105 - contextlib would have to be imported
                end.shutdown(_socket.SHUT_RDWR)
            except OSError:
                pass  # it is closed already


def answer(upstream: _socket.socket, client: _socket.socket, done: "_thread.LockType") -> None:
    """Copy the answers of one connection."""
    copy(upstream, client)
    done.release()


def connect(client: _socket.socket, path: str) -> None:
    """Serve one connection."""
    upstream = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        upstream.connect(path)
    except OSError:
        client.close()  # the command sees that nobody answers
        return
    done = _thread.allocate_lock()
    done.acquire()
    _thread.start_new_thread(answer, (upstream, client, done))
    copy(client, upstream)
    done.acquire()
    client.close()
    upstream.close()


def accept(listener: _socket.socket, path: str) -> None:
    """Serve every connection."""
    while True:
        descriptor, _ = listener._accept()  # pyright: ignore[reportAttributeAccessIssue] - accept() is socket's
        client = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM, 0, descriptor)
        client.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
        _thread.start_new_thread(connect, (client, path))


def main(port: str, path: str, *command: str) -> int:
    """Run ``command`` with the forwarder beside it; returns its exit code."""
    listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
    listener.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", int(port)))
    listener.listen(BACKLOG)
    child = os.fork()
    if child == 0:
        try:
            os.execvp(command[0], command)  # noqa: S606 - the sandbox's command
        except OSError as error:
            print(f"{command[0]}: {error.strerror}", file=sys.stderr)
            os._exit(127)
    _thread.start_new_thread(accept, (listener, path))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    # Not sys.exit: threads that copy for a connection nobody reads any more would be waited for.
    os._exit(main(*sys.argv[1:]))
