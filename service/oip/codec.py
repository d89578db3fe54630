"""Bytes of a request into named tensors, and named tensors into the bytes of a response."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from service.engine import Segments
from service.errors import ServiceError
from service.oip.schema import InferRequest, InferResponse, RequestInput, ResponseOutput

__all__ = ["HEADER_LENGTH", "ITEM_BYTES", "Tensor", "decode_infer", "encode_infer", "split_body"]

HEADER_LENGTH: Final = "Inference-Header-Content-Length"

# BF16 has no NumPy type; its values only ever pass through.
ITEM_BYTES: Final = {
    "BF16": 2,
    "UINT8": 1,
    "INT32": 4,
    "INT64": 8,
    "FP32": 4,
    "FP64": 8,
}
_NUMPY: Final[dict[str, np.dtype[Any]]] = {
    "UINT8": np.dtype("<u1"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
_REQUEST_DECODER: Final = msgspec.json.Decoder(InferRequest)
_ENCODER: Final = msgspec.json.Encoder()


@dataclass(slots=True)
class Tensor:
    """A named tensor whose values are little-endian, row-major bytes, perhaps in pieces."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    content: Segments

    @property
    def data(self) -> memoryview:
        """The values in one piece."""
        return self.content.join()

    def array(self) -> np.ndarray[Any, np.dtype[Any]]:
        """The values as a NumPy view; not for BF16."""
        return np.frombuffer(self.data, _NUMPY[self.datatype]).reshape(self.shape)


def _bad(message: str) -> ServiceError:
    return ServiceError(400, message)


def split_body(body_bytes: int, header_length: str | None) -> int:
    """Bytes of the JSON part.

    Raises:
        ServiceError: 400, the header is no number or out of range.
    """
    if header_length is None:
        return body_bytes
    if not (header_length.isascii() and header_length.isdigit() and len(header_length) <= 18):
        raise _bad(f"{HEADER_LENGTH} = {header_length[:40]!r}: must be a decimal number of bytes")
    length = int(header_length)
    if not 0 < length <= body_bytes:
        raise _bad(
            f"{HEADER_LENGTH} = {length}: must be in 1..{body_bytes}, the bytes of this body"
        )
    return length


def decode_infer(
    body: Segments, header_length: str | None, max_json_bytes: int
) -> tuple[InferRequest, dict[str, Tensor]]:
    """Parses the body of an inference request.

    Args:
        body: the whole body, decompressed.
        header_length: value of ``Inference-Header-Content-Length``, or None for a JSON body.
        max_json_bytes: largest JSON part.

    Returns:
        The request without its tensors' values, and the tensors by name.

    Raises:
        ServiceError: 400 with what is wrong, or 413 for too much JSON.
    """
    json_bytes = split_body(body.nbytes, header_length)
    if json_bytes > max_json_bytes:
        raise ServiceError(
            413,
            f"the JSON part has {json_bytes} bytes, at most {max_json_bytes} are allowed: "
            "send tensors in binary",
        )
    try:
        request = _REQUEST_DECODER.decode(body.slice(0, json_bytes).join())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        hint = "" if header_length else f" (if binary tensors follow it, send {HEADER_LENGTH})"
        raise _bad(f"cannot parse the request JSON: {error}{hint}") from None
    except RecursionError:
        raise _bad("cannot parse the request JSON: nested too deeply") from None

    tensors: dict[str, Tensor] = {}
    offset = json_bytes
    for given in request.inputs:
        if given.name in tensors:
            raise _bad(f"input {given.name!r} is given twice")
        tensor, offset = _tensor(given, body, offset)
        tensors[given.name] = tensor
    if offset != body.nbytes:
        raise _bad(
            f"the body has {body.nbytes - offset} bytes behind the last input's binary data: "
            "check binary_data_size and " + HEADER_LENGTH
        )
    return request, tensors


def _tensor(given: RequestInput, body: Segments, offset: int) -> tuple[Tensor, int]:
    name, datatype, shape = given.name, given.datatype, tuple(given.shape)
    if datatype not in ITEM_BYTES:
        raise _bad(f"input {name!r}: datatype {datatype!r} is not one of {', '.join(ITEM_BYTES)}")
    if any(key.startswith("shared_memory") for key in given.parameters):
        raise _bad(f"input {name!r}: shared memory regions are not supported: send the values")
    count = math.prod(shape)
    nbytes = count * ITEM_BYTES[datatype]
    size = given.parameters.get("binary_data_size")
    if size is None:
        data = given.data
        given.data = None
        values = _json_values(name, datatype, shape, data)
        return Tensor(name, datatype, shape, Segments([values])), offset
    if given.data is not None:
        raise _bad(f"input {name!r} has both data and binary_data_size: send one of them")
    if type(size) is not int or size < 0:
        raise _bad(f"input {name!r}: binary_data_size = {size!r}: must be a number of bytes")
    if size != nbytes:
        raise _bad(
            f"input {name!r}: binary_data_size = {size}, but shape {list(shape)} of {datatype} "
            f"is {nbytes} bytes"
        )
    if offset + size > body.nbytes:
        raise _bad(
            f"input {name!r}: binary_data_size = {size}, but only {body.nbytes - offset} bytes of "
            "the body are left"
        )
    content = body.slice(offset, offset + size)
    return Tensor(name, datatype, shape, content), offset + size


def _json_values(name: str, datatype: str, shape: tuple[int, ...], data: Any) -> memoryview:
    if data is None:
        raise _bad(f"input {name!r} has neither data nor binary_data_size")
    if datatype == "BF16":
        raise _bad(f"input {name!r}: BF16 cannot be sent as JSON: use binary data")
    flat = _flatten(name, data, shape)
    count = math.prod(shape)
    if len(flat) != count:
        raise _bad(
            f"input {name!r}: {len(flat)} values in data, but shape {list(shape)} has {count}"
        )
    dtype = _NUMPY[datatype]
    kinds = (int,) if dtype.kind in "iu" else (int, float)
    wrong = [value for value in flat if type(value) not in kinds][:1]  # may be None: JSON's null
    if wrong:
        raise _bad(f"input {name!r}: {str(wrong[0])[:40]!r} in data is no {datatype} value")
    try:
        wide = np.array(flat, np.int64 if dtype.kind in "iu" else np.float64)
    except OverflowError:
        raise _bad(f"input {name!r}: a value in data is outside {datatype}") from None
    with np.errstate(over="ignore"):
        values = wide.astype(dtype)
    fits = values == wide if dtype.kind in "iu" else np.isfinite(values)
    if not fits.all():
        raise _bad(f"input {name!r}: a value in data is outside {datatype}")
    return memoryview(values.tobytes())


def _flatten(name: str, data: list[Any], shape: tuple[int, ...]) -> list[Any]:
    """``data`` may be flat, or nested exactly as ``shape``."""
    level = data
    if not (level and isinstance(level[0], list)):
        return level
    for depth, length in enumerate(shape):
        if depth and any(not isinstance(row, list) or len(row) != length for row in level):
            raise _bad(f"input {name!r}: nested data does not have shape {list(shape)}")
        if depth:
            level = [value for row in level for value in row]
        elif len(level) != length:
            raise _bad(f"input {name!r}: nested data does not have shape {list(shape)}")
    return level


def encode_infer(
    response: InferResponse, outputs: list[tuple[Tensor, bool]]
) -> tuple[bytes, list[memoryview]]:
    """Serialises a response.

    Args:
        response: without outputs; they are filled in here.
        outputs: tensors with whether each goes out as binary.

    Returns:
        The JSON part, and the binary parts in order (none for a pure JSON response).

    Raises:
        ServiceError: 400 when BF16 is wanted as JSON.
    """
    parts: list[memoryview] = []
    for tensor, binary in outputs:
        entry = ResponseOutput(name=tensor.name, shape=list(tensor.shape), datatype=tensor.datatype)
        if binary:
            entry.parameters = {"binary_data_size": tensor.content.nbytes}
            parts += tensor.content.parts
        elif tensor.datatype == "BF16":
            raise _bad(
                f"output {tensor.name!r}: BF16 cannot be sent as JSON: ask for it with "
                'parameters {"binary_data": true}, or binary_data_output for all'
            )
        else:
            entry.data = tensor.array().ravel().tolist()
        response.outputs.append(entry)
    return _ENCODER.encode(response), parts
