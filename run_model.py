"""Generate from a model bigger than the GPU and measure it: `deepspeed run_model.py --model facebook/opt-66b --cpu-offload`."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from zero_inference.cli import main  # noqa: E402

if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is written and closed. What the interpreter would still tear down are the libraries' threads, whose end
    # now and then aborts a rank that succeeded, and gigabytes of page-locked memory, which the system frees faster.
    os._exit(code)
