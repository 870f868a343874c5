"""The system calls that a program in the sandbox may make, as a seccomp filter; the kernel answers ENOSYS to every other.

A list of what is allowed, so that a call that nobody thought of is refused: namespaces and limits do not cover keyrings, System V
shared memory, memfd, io_uring, vsock and whatever comes next. What remains is what one process without threads needs to
compute, to read and write files, and to wait. No clone, fork or vfork: there is one process, so its limits are the program's.

The filter is classic BPF over `struct seccomp_data` (linux/seccomp.h): number, architecture, address, six 64-bit arguments.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """What differs between machines: AUDIT_ARCH_* (linux/audit.h), the column in the table below, and the calls of jail.py."""

    audit: int
    column: int
    pivot_root: int
    keyctl: int


ARCHITECTURES = {"x86_64": Architecture(0xC000003E, 0, 155, 250), "aarch64": Architecture(0xC00000B7, 1, 41, 219)}

# Name, number on x86-64, number on aarch64 (- where it has none).
_TABLE = """
read 0 63  write 1 64  readv 19 65  writev 20 66  pread64 17 67  pwrite64 18 68  preadv 295 69  pwritev 296 70  lseek 8 62
open 2 -  openat 257 56  close 3 57  close_range 436 436  dup 32 23  dup2 33 -  dup3 292 24  fcntl 72 25  ioctl 16 29
stat 4 -  fstat 5 80  lstat 6 -  newfstatat 262 79  statx 332 291  access 21 -  faccessat 269 48  faccessat2 439 439
readlink 89 -  readlinkat 267 78  getdents64 217 61  getcwd 79 17  chdir 80 49  fchdir 81 50  statfs 137 43  fstatfs 138 44
getxattr 191 8  lgetxattr 192 9  fgetxattr 193 10  listxattr 194 11  llistxattr 195 12  flistxattr 196 13
mkdir 83 -  mkdirat 258 34  rmdir 84 -  unlink 87 -  unlinkat 263 35  rename 82 -  renameat 264 38  renameat2 316 276
symlink 88 -  symlinkat 266 36  link 86 -  linkat 265 37  chmod 90 -  fchmod 91 52  fchmodat 268 53  umask 95 166
truncate 76 45  ftruncate 77 46  fallocate 285 47  fsync 74 82  fdatasync 75 83  utimensat 280 88  fadvise64 221 223
sendfile 40 71  copy_file_range 326 285  pipe 22 -  pipe2 293 59  socketpair 53 199  sendto 44 206  recvfrom 45 207
shutdown 48 210  poll 7 -  ppoll 271 73  select 23 -  pselect6 270 72
epoll_create1 291 20  epoll_ctl 233 21  epoll_wait 232 -  epoll_pwait 281 22
mmap 9 222  mprotect 10 226  munmap 11 215  mremap 25 216  brk 12 214  madvise 28 233  msync 26 227
rt_sigaction 13 134  rt_sigprocmask 14 135  rt_sigreturn 15 139  rt_sigpending 127 136  rt_sigsuspend 130 133
rt_sigtimedwait 128 137  sigaltstack 131 132  kill 62 129  tkill 200 130  tgkill 234 131  pause 34 -  restart_syscall 219 128
alarm 37 -  getitimer 36 102  setitimer 38 103  nanosleep 35 101  clock_nanosleep 230 115  clock_gettime 228 113
clock_getres 229 114  gettimeofday 96 169  time 201 -  times 100 153  getrusage 98 165
execve 59 221  exit 60 93  exit_group 231 94  wait4 61 260  waitid 247 95
arch_prctl 158 -  set_tid_address 218 96  set_robust_list 273 99  rseq 334 293  futex 202 98  membarrier 324 283
sched_yield 24 124  sched_getaffinity 204 123  getcpu 309 168  prlimit64 302 261  getrlimit 97 163
getpid 39 172  getppid 110 173  gettid 186 178  getpgid 121 155  getpgrp 111 -  getsid 124 156  setsid 112 157
getuid 102 174  geteuid 107 175  getgid 104 176  getegid 108 177  getgroups 115 158  getresuid 118 148  getresgid 120 150
uname 63 160  sysinfo 99 179  getrandom 318 278
"""

# Calls of which only some forms are allowed: name -> 32-bit word of the arguments (argument n is words 2n and 2n + 1, low one
# first) -> its values. Of an int the kernel looks at the low word alone.
_FORMS: dict[str, dict[int, tuple[int, ...]]] = {
    "fcntl": {
        2: (0, 1, 2, 3, 4, 5, 6, 7, 1030)
    },  # duplicates, flags, locks: no larger pipes, leases or signals from files
    "ioctl": {
        2: (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
    },  # TCGETS(2), TIOCGWINSZ, FIO{NREAD,NBIO,(N)CLEX}
    "prlimit64": {0: (0,), 4: (0,), 5: (0,)},  # limits of this process are read; RLIMIT_CORE has to stay as it is
    "socketpair": {0: (1,)},  # AF_UNIX, which asyncio wakes itself by
    "sendto": {8: (0,), 9: (0,)},  # to the other end, not to a socket that has a name
}

_ALLOW, _NO_SUCH_CALL, _KILL_PROCESS = 0x7FFF0000, 0x00050000 | 38, 0x80000000  # SECCOMP_RET_*; 38 is ENOSYS
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF_LD | BPF_W | BPF_ABS, BPF_JMP | BPF_JEQ | BPF_K, BPF_RET | BPF_K
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16


def allowed(architecture: Architecture) -> dict[str, int]:
    """Name -> number of every call that may be made, in some form at least."""
    words = _TABLE.split()
    numbers = dict(zip(words[::3], words[1 + architecture.column :: 3]))
    return {name: int(number) for name, number in numbers.items() if number != "-"}


def filter_program(architecture: Architecture) -> bytes:
    """The filter as an array of `struct sock_filter`. A call in another architecture's convention ends the process."""
    code = [
        _step(_LOAD, _ARCHITECTURE_AT),
        _step(_EQUAL, architecture.audit, 1, 0),
        _step(_RETURN, _KILL_PROCESS),
        _step(_LOAD, _NUMBER_AT),
    ]
    for name, number in allowed(architecture).items():
        forms = _FORMS.get(name, {})
        body = [step for word, values in forms.items() for step in _one_of(word, values)]
        body.append(_step(_RETURN, _ALLOW))
        code += [_step(_EQUAL, number, 0, len(body)), *body]
    return b"".join([*code, _step(_RETURN, _NO_SUCH_CALL)])


def _one_of(word: int, values: tuple[int, ...]) -> list[bytes]:
    """Goes on behind itself if the word of the arguments is one of the values, else refuses the call."""
    tests = [_step(_EQUAL, value, len(values) - at, 0) for at, value in enumerate(values)]
    return [_step(_LOAD, _ARGUMENTS_AT + 4 * word), *tests, _step(_RETURN, _NO_SUCH_CALL)]


def _step(code: int, value: int, if_equal: int = 0, if_not: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_equal, if_not, value)
