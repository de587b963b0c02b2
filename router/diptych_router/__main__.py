"""The router: `python -m diptych_router --config FILE --prefill HOST:PORT,... --decode ...`."""

from __future__ import annotations

import gc
import sys

if __name__ == "__main__":
    gc.disable()  # imports make no garbage; `run_program` enables it again

from diptych_frontend.program import run_program
from diptych_router.program.arguments import parse_arguments
from diptych_router.program.program import run


def main() -> None:
    run_program("router", run(parse_arguments(sys.argv[1:])))


if __name__ == "__main__":
    main()
