"""The few driver calls of the CUDA backend: load, launch, tensor maps, small copies.

Everything runs in torch's primary context of the current device.
"""

from __future__ import annotations

import ctypes
from typing import Any

from megamoe.errors import BackendUnavailable, MegaMoeError

__all__ = [
    "Kernel",
    "Module",
    "block_map",
    "check",
    "chunk_map",
    "copy_from_device",
    "copy_to_device",
    "driver_api",
    "fill_device",
    "tensor_map",
]


def driver_api() -> Any:
    """``cuda.bindings.driver``.

    Raises:
        BackendUnavailable: it is not installed.
    """
    try:
        from cuda.bindings import driver
    except ImportError as e:
        raise BackendUnavailable(
            "cuda-bindings is not installed: pip install 'megamoe[cuda]'"
        ) from e
    return driver


def check(result: tuple[Any, ...], what: str) -> Any:
    """What a call of the driver or the runtime returned beside its status.

    Args:
        result: the status, then values.
        what: was tried, for the message.

    Raises:
        MegaMoeError: the status is not success.
    """
    error, *values = result
    if int(error) != 0:
        raise MegaMoeError(f"{what}: {error}")
    return values[0] if len(values) == 1 else tuple(values)


class Module:
    """A loaded cubin. It stays loaded as long as the process lives."""

    def __init__(self, image: bytes) -> None:
        from cuda.bindings import runtime

        # Makes the device's primary context current, where torch has not yet done so.
        check(runtime.cudaFree(0), "starting CUDA")
        self._handle = check(driver_api().cuModuleLoadData(image), "loading a kernel")

    def function(self, name: str) -> Any:
        """A kernel of the module."""
        return check(driver_api().cuModuleGetFunction(self._handle, name.encode()), name)


class Kernel:
    """A kernel with a fixed launch shape and one structure as its parameter.

    ``cooperative``: all CTAs are resident or none starts. ``programmatic``: may start before the
    kernel ahead of it in the stream has ended, and waits for it itself (``griddepcontrol.wait``).
    """

    def __init__(
        self,
        module: Module,
        name: str,
        *,
        threads: int,
        shared_bytes: int = 0,
        cooperative: bool = False,
        programmatic: bool = False,
    ) -> None:
        driver = driver_api()
        self._module = module
        self._function = module.function(name)
        self._name = name
        if shared_bytes:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(driver.cuFuncSetAttribute(self._function, attribute, shared_bytes), name)
        self._config = driver.CUlaunchConfig()
        self._config.gridDimX = self._config.gridDimY = self._config.gridDimZ = 1
        self._config.blockDimX, self._config.blockDimY, self._config.blockDimZ = threads, 1, 1
        self._config.sharedMemBytes = shared_bytes
        attributes = []
        if cooperative:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
            attributes.append(attribute)
        if programmatic:
            attribute = driver.CUlaunchAttribute()
            ids = driver.CUlaunchAttributeID
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        self._config.attrs = attributes
        self._config.numAttrs = len(attributes)
        # Through ctypes: the binding's own call converts the configuration anew each time, which
        # takes several µs of the host.
        self._launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
        self._launch.argtypes = (ctypes.c_void_p,) * 4
        self._address = int(self._config.getPtr())
        self._entry = int(self._function)
        self._pointers = (ctypes.c_void_p * 1)()
        self._grid = self._stream = -1

    def launch(self, grid: int, params: ctypes.Structure, stream: int) -> None:
        """Enqueues one launch; ``params`` may be changed as soon as this returns.

        Raises:
            MegaMoeError: the driver refuses, e.g. a cooperative grid that does not fit.
        """
        self._pointers[0] = ctypes.addressof(params)
        if grid != self._grid:
            self._grid = self._config.gridDimX = grid
        if stream != self._stream:
            self._stream = self._config.hStream = stream
        error = self._launch(self._address, self._entry, ctypes.addressof(self._pointers), None)
        if error:
            name = driver_api().CUresult(error).name
            raise MegaMoeError(f"launching {self._name} on {grid} CTAs: {name}")


def tensor_map(
    address: int,
    *,
    columns: int,
    rows: int,
    box: tuple[int, int],
    element_bytes: int,
) -> bytes:
    """A 2D map of contiguous rows, boxes of ``(columns, rows)``, 128-byte swizzle: 128 bytes."""
    pitch = columns * element_bytes
    return _tensor_map(address, (columns, rows), (pitch,), box, element_bytes)


def block_map(
    address: int, *, columns: int, rows: int, box: tuple[int, int], element_bytes: int
) -> bytes:
    """A 3D map of contiguous rows as blocks of 128 bytes: (element, row, block of the row).

    Args:
        address: of the first element.
        columns: elements of a row, whole blocks.
        rows: of the matrix.
        box: rows and blocks of a box, which lands block by block, 128-byte swizzle.
        element_bytes: 1 or 2.
    """
    block = 128 // element_bytes
    sizes = (block, rows, columns // block)
    return _tensor_map(address, sizes, (columns * element_bytes, 128), (block, *box), element_bytes)


def chunk_map(address: int, *, nbytes: int, distance: int) -> bytes:
    """A 5D map of chunks of 4 KiB, as 32 rows each, whose boxes are four chunks: 128 bytes.

    The box at ``(0, 0, 0, 0, i)`` is chunks i, i + d, i + 4 and i + 4 + d, in this order, d being
    ``distance``.
    """
    sizes = (128, 32, 2, 2, nbytes // 4096)
    strides = (128, distance * 4096, 4 * 4096, 4096)
    return _tensor_map(address, sizes, strides, (128, 32, 2, 2, 1), 1)


def _tensor_map(
    address: int,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    element_bytes: int,
) -> bytes:
    """``strides`` in bytes, without the first dimension's."""
    driver = driver_api()
    kind = driver.CUtensorMapDataType
    dtype = {
        1: kind.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        2: kind.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    }[element_bytes]
    encoded = check(
        driver.cuTensorMapEncodeTiled(
            dtype,
            len(sizes),
            address,
            [driver.cuuint64_t(size) for size in sizes],
            [driver.cuuint64_t(stride) for stride in strides],
            [driver.cuuint32_t(b) for b in box],
            [driver.cuuint32_t(1)] * len(sizes),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        f"a tensor map of {sizes}",
    )
    return b"".join(int(word).to_bytes(8, "little") for word in encoded.opaque)


def copy_to_device(address: int, data: bytes) -> None:
    """Writes bytes to device memory, own or a mapped peer's; returns when they are there."""
    check(driver_api().cuMemcpyHtoD(address, data, len(data)), "writing to a window")


def copy_from_device(address: int, nbytes: int) -> bytes:
    """Reads bytes of device memory."""
    buffer = bytearray(nbytes)
    target = (ctypes.c_char * nbytes).from_buffer(buffer)
    check(driver_api().cuMemcpyDtoH(ctypes.addressof(target), address, nbytes), "reading a window")
    return bytes(buffer)


def fill_device(address: int, nbytes: int) -> None:
    """Zeroes device memory; returns when it is done."""
    check(driver_api().cuMemsetD8(address, 0, nbytes), "clearing a window")
    check(driver_api().cuCtxSynchronize(), "clearing a window")
