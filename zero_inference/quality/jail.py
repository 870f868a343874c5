"""Runs one Python program where it can reach nothing: started by `sandbox.py` as a process of its own, standard library only.

Three processes, so that the program cannot outlive them: the keeper, which is told what to run; the founder, which enters new
user, mount, network, process, IPC, cgroup and host name namespaces; and the warden, process 1 of the new process
namespace, whose end
kills whatever is left inside. Each dies with the one before it (PR_SET_PDEATHSIG).

Inside there is no network but a loopback that is down, no environment, no /proc, and of the file system the interpreter,
its libraries and the system's, all read-only, and a /tmp in memory. The program has no capability and cannot get one, no
session keyring of the user's, and no system call but those of `system_calls.py`.
"""

import ctypes
import json
import os
import resource
import signal
import sys

NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
# mount, cgroup, host name, IPC, user, process, network: linux/sched.h CLONE_NEW*
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
AT_FDCWD, AT_RECURSIVE, SYS_MOUNT_SETATTR = -100, 0x8000, 442  # the same number on every architecture; Linux 5.12
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
SECCOMP_MODE_FILTER, KEYCTL_JOIN_SESSION_KEYRING = 2, 1
NOBODY = 65534
DEVICES = ("null", "zero", "random", "urandom")

libc = ctypes.CDLL(None, use_errno=True)


class FilterProgram(ctypes.Structure):
    """struct sock_fprog (linux/filter.h)."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def call(what: str, function, *arguments) -> None:
    """A system call of libc; raises OSError that names `what`."""
    if function(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def mount(source, target: str, kind, flags: int, options: str = "") -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind)]
    call(f"mount {target}", libc.mount, *encoded, ctypes.c_ulong(flags), options.encode() or None)


def make_read_only(target: str, recursive: bool, devices: bool = False) -> None:
    flags = MS_RDONLY | MS_NOSUID | (0 if devices else MS_NODEV)  # MOUNT_ATTR_* of these have the same values
    attributes = (ctypes.c_uint64 * 4)(flags, 0, 0, 0)
    call(
        f"make {target} read-only",
        libc.syscall,
        ctypes.c_long(SYS_MOUNT_SETATTR),
        ctypes.c_int(AT_FDCWD),
        target.encode(),
        ctypes.c_uint(AT_RECURSIVE if recursive else 0),
        ctypes.byref(attributes),
        ctypes.c_size_t(32),
    )


def bind(path: str, root: str, devices: bool = False) -> None:
    """Show what is at `path` outside, also through symbolic links, at the same place under `root`, read-only."""
    target = root + path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        open(target, "w").close()
    mount(path, target, None, MS_BIND | MS_REC)
    make_read_only(target, recursive=True, devices=devices)


def build_root(task: dict) -> None:
    """Make the file system of the program and enter it, for good.

    The root is a folder of the mount that the process is pivoted to: inside a chroot no user namespace can be made, and the
    pivot leaves nothing of the outside to escape to. /tmp comes first, because what is to be shown may lie under it.
    """
    base, root = task["base"], task["base"] + "/root"
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", base, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    os.makedirs(root + "/tmp")
    size = f"size={task['disk_bytes']},nr_inodes=1024,mode=1777"
    mount("tmpfs", root + "/tmp", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, size)
    for path in sorted({*task["binds"], *task["hidden"]}):  # what lies inside another comes after it
        if path in task["hidden"]:
            mount("tmpfs", root + path, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
        else:
            bind(path, root)
    for name in DEVICES:
        bind(f"/dev/{name}", root, devices=True)
    for path in ("", *(f"/root{hidden}" for hidden in task["hidden"])):
        make_read_only(base + path, recursive=False)
    os.chdir(base)
    call("pivot_root", libc.syscall, ctypes.c_long(task["pivot_root"]), b".", b".")
    call("leave the old root", libc.umount2, b".", MNT_DETACH)
    os.chroot("root")
    os.chdir("/tmp")


def forbid_more_namespaces() -> None:
    """Belt and braces with the chroot; /proc is read-only in some containers."""
    try:
        with open("/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("0")
    except OSError:
        pass


def become_program(task: dict, report_fd: int, result_fd: int, switch_user: bool, signals: set) -> None:
    """In the last child: limits, no privileges, the filter of system calls, then the interpreter."""
    with open(os.memfd_create("program"), "r+b") as told:
        told.write(json.dumps(task["program"]).encode())
        told.seek(0)
        os.dup2(told.fileno(), 0)
    os.dup2(1, 2)
    os.dup2(result_fd, 3)
    os.setsid()
    # A core limit of 1 byte, unlike 0, keeps the kernel from starting the system's core dump handler, which runs outside.
    for name, value in (
        ("CPU", task["cpu_s"]),
        ("AS", task["memory_bytes"]),
        ("FSIZE", task["file_bytes"]),
        ("CORE", 1),
        ("NOFILE", 64),
        ("MEMLOCK", 0),
        ("MSGQUEUE", 0),
    ):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    libc.syscall(
        ctypes.c_long(task["keyctl"]), KEYCTL_JOIN_SESSION_KEYRING, None
    )  # some kernels have none; the filter refuses it
    number = 0
    while libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0) == 0:
        number += 1
    if switch_user:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    call("no new privileges", libc.prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    instructions = bytes.fromhex(task["filter"])
    program = FilterProgram(len(instructions) // 8, instructions)
    call("filter system calls", libc.prctl, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)
    os.write(report_fd, b"started\n")
    signal.pthread_sigmask(signal.SIG_SETMASK, signals)
    os.execve(task["python"], [task["python"], "-I", "-S", "-B", "-c", task["driver"]], {})


def die_with_parent(parent: int) -> None:
    """From here on, and not if the parent is gone already. A change of user forgets it."""
    call("die with the parent", libc.prctl, PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def warden(task: dict, report_fd: int, result_fd: int, switch_user: bool) -> None:
    """Process 1 inside: starts the program and says how it ended. The program may be of the same user, and signal it."""
    signals = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    call("die with the parent", libc.prctl, PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    call("be unreadable", libc.prctl, PR_SET_DUMPABLE, 0, 0, 0, 0)
    os.umask(0o022)
    forbid_more_namespaces()
    build_root(task)
    program = os.fork()
    if program == 0:
        run_and_exit(report_fd, become_program, task, report_fd, result_fd, switch_user, signals)
    for fd in (0, 1, 2, result_fd):
        os.close(fd)
    while True:
        pid, status = os.wait()
        if pid == program:
            break
    os.write(report_fd, b"ended %d\n" % os.waitstatus_to_exitcode(status))


def found(task: dict, report_fd: int, result_fd: int, ready: int, mapped: int) -> None:
    """The founder: enter the namespaces, wait until the users are mapped, start the warden."""
    keeper = os.getppid()
    call("unshare", libc.unshare, NAMESPACES)
    os.write(ready, b"x")
    switch_user = os.read(mapped, 1) == b"2"
    die_with_parent(keeper)
    child = os.fork()
    if child == 0:
        run_and_exit(report_fd, warden, task, report_fd, result_fd, switch_user)
    for fd in (0, 1, 2, report_fd, result_fd):
        os.close(fd)
    os.waitpid(child, 0)


def run_and_exit(report_fd: int, function, *arguments) -> None:
    try:
        function(*arguments)
    except BaseException as error:
        os.write(report_fd, f"refused {error}\n".encode())
        os._exit(1)
    os._exit(0)


def map_users(founder: int) -> bytes:
    """Write the founder's user and group maps. b"2" if the program can be somebody else than the warden, else b"1".

    As root both root, who may read wherever the interpreter lies, and nobody are mapped. Other users may map only themselves.
    """
    folder = f"/proc/{founder}"
    if os.geteuid() == 0:
        try:
            for name in ("uid_map", "gid_map"):
                write(f"{folder}/{name}", f"0 0 1\n{NOBODY} {NOBODY} 1\n")
            return b"2"
        except OSError:
            pass
    write(f"{folder}/uid_map", f"{os.geteuid()} {os.geteuid()} 1\n")
    write(f"{folder}/setgroups", "deny")
    write(f"{folder}/gid_map", f"{os.getegid()} {os.getegid()} 1\n")
    return b"1"


def write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def keep(report_fd: int, result_fd: int) -> None:
    """The keeper, in the namespaces of whoever asked."""
    task = json.loads(sys.stdin.buffer.read())
    for fd in (report_fd, result_fd):
        os.set_inheritable(fd, False)
    die_with_parent(task["asker"])
    ready_out, ready_in = os.pipe()
    mapped_out, mapped_in = os.pipe()
    founder = os.fork()
    if founder == 0:
        os.close(ready_out)
        os.close(mapped_in)
        run_and_exit(report_fd, found, task, report_fd, result_fd, ready_in, mapped_out)
    os.close(ready_in)
    os.close(mapped_out)
    if os.read(ready_out, 1):
        os.write(mapped_in, map_users(founder))
        os.close(mapped_in)
    for fd in (0, 1, 2, result_fd):
        os.close(fd)
    os.waitpid(founder, 0)


if __name__ == "__main__":
    run_and_exit(int(sys.argv[1]), keep, int(sys.argv[1]), int(sys.argv[2]))
