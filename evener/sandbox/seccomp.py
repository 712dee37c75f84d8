"""The system calls that no agent needs are refused, so that a hole in the kernel behind one of them is out of reach.

A classic BPF program (seccomp(2)) is made by hand: a list of denied calls, no new namespaces (``clone`` with a namespace
flag; ``clone3`` does not exist, so that libc falls back to ``clone``), and sockets of four families only: ``AF_VSOCK``
would reach the host of a virtual machine past the empty network namespace. Called by the bubblewrap sandbox.
"""

import platform
import struct

_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; the low half, little-endian
_KILL, _ERRNO, _ALLOW = 0x8000_0000, 0x0005_0000, 0x7FFF_0000
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_X32 = 0x4000_0000
# NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET (sched.h); NEWTIME is known to clone3 alone
_NAMESPACE_FLAGS = 0x0002_0000 | 0x0200_0000 | 0x0400_0000 | 0x0800_0000 | 0x1000_0000 | 0x2000_0000 | 0x4000_0000
_FAMILIES = (1, 2, 10, 16)  # UNIX, INET, INET6, NETLINK (libc lists interfaces with it)

_AUDIT = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_SOCKET = {"x86_64": 41, "aarch64": 198}
_CLONE3 = 435
# name: (x86_64, aarch64), from asm/unistd_64.h and asm-generic/unistd.h
_DENIED = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}

_Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


def program(machine: str = platform.machine()) -> bytes | None:
    """The filter for ``machine`` as an array of ``struct sock_filter``; None where there is none."""
    if machine not in _AUDIT:
        return None
    column = list(_AUDIT).index(machine)
    code: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, _AUDIT[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":  # the x32 calls have numbers of their own
        code += [(_JUMP_GREATER_EQUAL, 0, 1, _X32), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    for numbers in _DENIED.values():
        code += [(_JUMP_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    code += [(_JUMP_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    clone = [(_LOAD, 0, 0, _FIRST_ARGUMENT), (_JUMP_ANY_BIT, 0, 1, _NAMESPACE_FLAGS), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    code += [(_JUMP_EQUAL, 0, len(clone) + 1, _CLONE[machine]), *clone, (_RETURN, 0, 0, _ALLOW)]
    allowed = [(_JUMP_EQUAL, len(_FAMILIES) - index, 0, family) for index, family in enumerate(_FAMILIES)]
    socket = [(_LOAD, 0, 0, _FIRST_ARGUMENT), *allowed, (_RETURN, 0, 0, _ERRNO | _EAFNOSUPPORT)]
    code += [(_JUMP_EQUAL, 0, len(socket), _SOCKET[machine]), *socket, (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)
