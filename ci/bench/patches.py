"""What a policy's embedding of patches takes, beside torch's convolution.   python ci/bench/patches.py [--patches 288]

The same weights and patches, one core, forward and backward, in fp32 and bf16, at the toy's width and at that of
Qwen2.5-VL. A convolution's gradient in bf16 may take a minute.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import time  # noqa: E402

import torch  # noqa: E402

from drivelit.policy.model import load_policy  # noqa: E402

WIDTHS = {"toy": 64, "Qwen2.5-VL": 1280}


def seconds(module, patches):
    "Of a forward and a backward pass."
    module.zero_grad()
    begin = time.perf_counter()
    module(patches).float().square().mean().backward()
    return time.perf_counter() - begin


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--patches", type=int, default=288, help="of a picture of 336 x 168")
    args = p.parse_args()
    torch.set_num_threads(1)
    own = type(load_policy("toy", size="tiny").model.model.visual.patch_embed.proj)
    for width, channels in WIDTHS.items():
        for dtype in (torch.float32, torch.bfloat16):
            kernel = dict(kernel_size=(2, 14, 14), stride=(2, 14, 14), bias=False, dtype=dtype)
            modules = torch.nn.Conv3d(3, channels, **kernel), own(3, channels, **kernel)
            patches = torch.randn(args.patches, 3, 2, 14, 14, dtype=dtype)
            stock, fast = (min(seconds(m, patches) for _ in range(2)) for m in modules)
            print(
                f"{width:11} {str(dtype)[6:]:9} convolution {stock:7.3f} s, ours {fast:6.3f} s: {stock / fast:6.1f} x"
            )


if __name__ == "__main__":
    main()
