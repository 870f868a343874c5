"""The program of `forks.write_copier`: `copied.py SOCKET EXECUTABLE ARGUMENTS` runs the arguments in a copy of the process that listens at
SOCKET; EXECUTABLE is the copy's sys.executable.

Without the site module this starts in some hundredths of a second.
"""

import json
import os
import signal
import socket
import sys


def main() -> None:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    socket.send_fds(connection, [b"\n"], [0, 1, 2])
    request = dict(
        executable=sys.argv[2], argv=sys.argv[3:], env=dict(os.environ), cwd=os.getcwd(), session=False, bound=True
    )
    connection.sendall(json.dumps(request).encode() + b"\n")
    with connection.makefile("r") as told:
        pid = int(told.readline())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda sent, _: os.kill(pid, sent))
        code = int(told.readline())
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
