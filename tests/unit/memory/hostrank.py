"""bench.switch_gpurank over virtual memory of the host: `python -m tests.unit.memory.hostrank SETTINGS`."""

import json
import sys

import torch

from bench.switch_gpurank import GpuRank
from bench.switch_serve import serve
from plexrl.memory import cuda_tensor
from plexrl.memory.cuda import CudaDevice
from tests.unit.memory.hostvmm import GRAIN, Card, HostVmm, LateMover

if __name__ == "__main__":
    torch.set_num_threads(1)
    told = json.loads(sys.argv[1])
    driver = HostVmm(Card(told["device_bytes"] + 2 * GRAIN))
    device = CudaDevice(told["device_bytes"], driver, LateMover(), kind=cuda_tensor.CPU, context=5, chunk=2 * GRAIN)
    serve(GpuRank(told, device, "cpu"))
    device.close()
    if driver.card.used or driver.mapped or driver.reserved:
        sys.exit("the device leaked")
