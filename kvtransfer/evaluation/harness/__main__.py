"""lm_eval's own command, with our model and our tasks in it, and all of its flags.

    python -m kvtransfer.evaluation.harness --model kvtransfer \\
        --model_args source=A,target=B,mapping=DIR,condition=mapped --tasks kvtransfer_guides
"""

import argparse
import sys
from typing import Any

from kvtransfer.errors import KVTransferError, TaskError
from kvtransfer.evaluation.harness.extra import require_lm_eval


def main() -> None:
    """Run it. A foreseen failure prints ``error:`` and ``hint:`` lines, and exits 1 (usage: 2)."""
    try:
        _run()
    except KVTransferError as error:
        _fail(error.message, error.hint, code=1)
    except ConnectionError as error:
        _offline(error)
    except (OSError, ValueError) as error:
        _fail(str(error), "see python -m kvtransfer.evaluation.harness run --help", code=2)
    except KeyboardInterrupt:
        _fail("interrupted", None, code=130)


def _run() -> None:
    require_lm_eval()
    from lm_eval._cli import HarnessCLI
    from lm_eval.utils import setup_logging

    import kvtransfer.evaluation.harness.lm  # noqa: F401  # registers the model
    from kvtransfer.hf.quiet import quiet

    quiet()
    setup_logging()
    harness = HarnessCLI()
    arguments = harness.parse_args()
    _complete(arguments)
    harness.execute(arguments)


def _complete(arguments: argparse.Namespace) -> None:
    """Let it find our tasks beside those that it was told of, and a device that is there.

    lm-eval takes the first GPU where no device is named, and runs on the CPU where there is none;
    ours refuses a device that is absent, so it is named here.
    """
    import torch

    from kvtransfer.evaluation.harness.tasks import OWN

    told = _configured(arguments)
    if hasattr(arguments, "include_path"):
        given = arguments.include_path or told.get("include_path") or []
        arguments.include_path = [str(OWN), *([given] if isinstance(given, str) else given)]
    if getattr(arguments, "command", None) == "run" and not (
        getattr(arguments, "device", None) or told.get("device")
    ):
        arguments.device = "cuda:0" if torch.cuda.is_available() else "cpu"


def _configured(arguments: argparse.Namespace) -> dict[str, Any]:
    """What a file given as ``--config`` says; the command line goes before it."""
    if not (path := getattr(arguments, "config", None)):
        return {}
    from lm_eval.config.evaluate_config import EvaluatorConfig

    return dict(EvaluatorConfig.load_yaml_config(path))


def _offline(error: ConnectionError) -> None:
    from kvtransfer.evaluation.harness.tasks import without_data

    named: TaskError = without_data("asked for", error)
    _fail(named.message, named.hint, code=1)


def _fail(message: str, hint: str | None, *, code: int) -> None:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    if hint:
        print(f"hint: {' '.join(hint.split())}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
