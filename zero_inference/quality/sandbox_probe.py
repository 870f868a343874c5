"""A program that tries to get out of the sandbox; it passes where everything was refused. `sandbox.check_isolation` runs it."""

from __future__ import annotations

PROBE = """
import ctypes, os, resource, socket
def refused(action, *arguments):
    try:
        action(*arguments)
    except OSError:
        return True
    return False
assert not os.environ, "the environment is not empty"
for folder in ("/", "/usr", OUTSIDE):
    assert refused(open, os.path.join(folder, "zero-inference-probe"), "w"), folder + " can be written to"
assert not os.path.exists(SECRET_FOLDER), "the files of the outside can be seen"
for address in (("127.0.0.1", 9), ("192.0.2.1", 9)):
    assert refused(socket.create_connection, address, 1), "there is a network"
assert os.getpid() < 10, "other processes can be seen"
assert refused(os.fork), "processes are not limited"
libc = ctypes.CDLL(None)
assert libc.unshare(0x10000000) != 0, "a namespace can be made inside"
assert libc.shmget(0, ctypes.c_size_t(4096), 0o1600) < 0 and libc.msgget(0, 0o1600) < 0, "memory can be had from outside the limits"
assert refused(os.memfd_create, "probe"), "memory can be had from outside the limits"
assert libc.syscall(ctypes.c_long(KEYCTL), 0, -3, 0) < 0, "the keyring of the session can be reached"
open("/tmp/file", "w").write("x")
try:
    block = bytearray(resource.getrlimit(resource.RLIMIT_AS)[0])
except MemoryError:
    pass
else:
    raise AssertionError("memory is not limited")
"""
