"""Generate from a model bigger than the GPU and measure it: `deepspeed run_model.py --model facebook/opt-66b --cpu-offload`."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from zero_inference.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
