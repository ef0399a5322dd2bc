"""One GPU, the first that this process sees."""

import pytest

SIZE = 1 << 29
CHUNK = 64 << 20


@pytest.fixture
def gpu():
    """A CudaDevice of SIZE bytes that is empty again afterwards."""
    from plexrl.memory.cuda import cuda_device

    device = cuda_device(0, SIZE, CHUNK)
    yield device
    device.close()
