"""How fast is your model from NVMe? python examples/nvme_offload.py [MODEL] [FOLDER_ON_THE_DISK]

Weights are on disk and are read for each token. The same in a shell, with more loops:
    python run_model.py MODEL --engine stream --disk-offload --gpu-memory 0 --offload-dir FOLDER
"""

import sys
from pathlib import Path

from zero_inference import run

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
folder = sys.argv[2] if len(sys.argv) > 2 else "~/offload_dir"

on_disk = dict(engine="stream", disk_offload=True, gpu_memory=0, offload_dir=folder)
result = run(model, **on_disk, prompt_len=32, gen_len=4, loops=1, warmup=0)
print(result)

# the line of JSON that was appended to result.record_file; `zero-inference report logs` shows all of them
record = result.record
read = record["transfers"]["disk_read_bytes_per_step"]
print(f"a token reads {read / 1e9:.3f} GB from disk: {read / result.step_s / 1e9:.2f} GB/s")
if (disk := record["limit"].get("disk_alone_gbps")) is not None:
    print(f"reads alone reach {disk:.2f} GB/s, measured in the same process")
print("record:", Path(result.record_file).resolve())
