"""How fast is your model from NVMe? python examples/nvme_offload.py [MODEL] [FOLDER_ON_THE_DISK]

Weights lie on disk and are read for each token, by DeepSpeed through libaio. The same in a shell, with more loops:
    deepspeed --num_gpus 1 run_model.py --model MODEL --disk-offload --offload-dir FOLDER
"""

import sys
from pathlib import Path

from zero_inference import run

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
folder = sys.argv[2] if len(sys.argv) > 2 else "~/offload_dir"

result = run(
    model, engine="deepspeed", disk_offload=True, offload_dir=folder, prompt_len=32, gen_len=4, loops=1, warmup=0
)
print(result)

record = (
    result.record
)  # the line of JSON that was appended to result.record_file; `zero-inference report logs` shows all of them
read = record["transfers"]["disk_read_bytes_per_step"]
print(f"a token reads {read / 1e9:.3f} GB from disk: {read / result.step_s / 1e9:.2f} GB/s")
if (disk := record["limit"]["disk_gbps"]) is not None:
    print(f"the disk itself reads {disk:.2f} GB/s, measured in the same process")
print("record:", Path(result.record_file).resolve())
