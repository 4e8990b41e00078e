"""Gloo in NCCL's place inside a vLLM without a GPU, so that its own code of weight transfer can be run and recorded.

    bash ci/serve_vllm.sh FOLDER PORT --weight-transfer-config '{"backend": "nccl"}' \
        --worker-extension-cls drivelit_gloo.OverGloo

Only the communicator is another one: routes, checks, ranks, the order of tensors and how they are loaded are vLLM's.
What stands in the place of NCCL's 128 bytes is "HOST PORT" of the trainer's store (drivelit.testing.vllm.GlooGroup).
"""

from datetime import timedelta

import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo, TCPStore
from vllm.distributed.weight_transfer import nccl_common

WAIT = timedelta(seconds=60)


class Group:
    "As much of vLLM's PyNcclCommunicator as its engine of weight transfer uses."

    def __init__(self, unique_id, rank, world):
        host, port = unique_id.rstrip(b"\0").decode().split()
        store = TCPStore(host, int(port), world, is_master=False, timeout=WAIT)
        self.group = ProcessGroupGloo(store, rank, world, WAIT)
        self.group.allreduce([torch.zeros(1)]).wait()  # NCCL's warm-up

    def broadcast(self, tensor, src, stream=None):
        options = BroadcastOptions()
        options.rootRank = src
        self.group.broadcast([tensor.reshape(-1).view(torch.uint8)], options).wait()

    def destroy(self):
        self.group = None


nccl_common.uid_init_process_group = lambda unique_id, rank, world, device: Group(unique_id, rank, world)
torch.accelerator.current_device_index = lambda: 0  # without a GPU both raise
torch.cuda.current_stream = lambda device=None: None


class OverGloo:
    "Nothing of its own: vLLM imports this module in each worker on its account."
