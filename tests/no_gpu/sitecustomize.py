"""On PYTHONPATH, this hides the GPUs from every Python process before it can ask for them."""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""
