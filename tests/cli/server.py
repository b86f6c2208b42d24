"""Runs commands as a shell would, without importing torch for each of them.

Reads one JSON object a line (``arguments``, and the files to be ``stdin``, ``stdout`` and
``stderr``), runs the command in a fork of this process, and answers with its exit status.
"""

import json
import os
import sys
from typing import Any

from kvtransfer import check, evaluate, fit
from kvtransfer.cli.main import main

IMPORTED = (check, evaluate, fit)
"""What commands import when they run, and with it torch: once, here."""


def run(asked: dict[str, Any]) -> int:
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    status = 70
    try:
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            os.dup2(os.open(asked[name], flags), number)
        sys.stdin = os.fdopen(0, encoding="utf-8")
        sys.argv = ["kvtransfer", *asked["arguments"]]
        main()
    except SystemExit as stop:
        code = 0 if stop.code is None else stop.code  # as a shell sees it
        status = code if isinstance(code, int) else 71
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    for line in sys.stdin:
        print(run(json.loads(line)), flush=True)
